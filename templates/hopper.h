// What Hopper's kernels add to CUTLASS's collectives: a main loop that loads no more rows than the operands have and can
// start ahead of the kernel before it, and an epilogue that adds up the parts of a tile whose k was divided among the
// blocks of a cluster.
#pragma once

#include <cstdint>

namespace w8a8 {

// How a launch may overlap with the kernel before it on the stream; the values are Call::overlap.
enum Overlap : int32_t {
  kNone = 0,     // starts when that kernel has ended, as any kernel does
  kLaunch = 1,   // starts when that kernel lets its dependents start, and waits for its end before touching memory
  kWeights = 2,  // also loads weights before it waits; they must not be written by work that may still run
};

#if defined(__CUDACC__)

// Waits until all grids before this one have ended and their writes are visible. No-op in an ordinary launch.
__device__ inline void wait_for_preceding_grids() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Lets the next kernel on the stream start once every block has come this far or ended.
__device__ inline void start_dependent_grids() { asm volatile("griddepcontrol.launch_dependents;"); }

#endif

// A collective main loop of CUTLASS whose blocks wait for the preceding grids by themselves, as late as they can: with
// Overlap::kWeights the pipeline's stages are filled with weights first.
//
// Rows of a tile that lie beyond the operand are not loaded: TMA would fill them with zeros at a third of the speed at
// which it loads rows. What shared memory holds there reaches rows or columns of the accumulators that are not stored.
//
// With Slices > 1 the blocks of a cluster along m work on one tile, each on its own slice of k; to CUTLASS the slices
// are the batch mode l of the operands, and the m coordinate of a block counts slices as well.
template <class Base, bool WeightsAreA, int Slices>
struct Mainloop : Base {
  static_assert(Slices == 1 || cute::size(typename Base::DispatchPolicy::ClusterShape{}) == 1,
                "blocks that divide k do not multicast");

  // The cluster that the kernel sees. The main loop's own copies know none when blocks divide k.
  struct DispatchPolicy : Base::DispatchPolicy {
    using ClusterShape = cute::conditional_t<
        Slices == 1, typename Base::DispatchPolicy::ClusterShape, cute::Shape<cute::Int<Slices>, cute::_1, cute::_1>>;
  };

  struct Arguments : Base::Arguments {
    int32_t overlap = kNone;
    bool once = false;  // whether each weight is read by one block, or cluster, only
  };

  struct Params : Base::Params {
    int32_t overlap = kNone;
    bool once = false;
    int32_t rows_a = 0, rows_b = 0;
    int32_t whole_a = 0, whole_b = 0;    // tiles that have all rows
    cute::TmaDescriptor rest_a, rest_b;  // boxes of as many rows as the last box of the operand has
  };

  using typename Base::MainloopPipeline;
  using typename Base::PipelineState;
  using typename Base::TensorStorage;

  // What a block has of each operand: the rows of a tile, and those of them that it loads, in one box.
  using Cluster = typename Base::DispatchPolicy::ClusterShape;
  static constexpr int kTileK = cute::size<2>(typename Base::TileShape{});
  static constexpr int kTileRowsA = cute::size<0>(typename Base::TileShape{});
  static constexpr int kTileRowsB = cute::size<1>(typename Base::TileShape{});
  static constexpr int kBoxRowsA = kTileRowsA / cute::size<1>(Cluster{});
  static constexpr int kBoxRowsB = kTileRowsB / cute::size<0>(Cluster{});
  static_assert(kTileK * (kTileRowsA + kTileRowsB) == Base::TmaTransactionBytes, "elements of one byte");

#if !defined(__CUDACC__)

  template <class ProblemShape>
  static Params to_underlying_arguments(ProblemShape const& shape, Arguments const& args, void* workspace) {
    using namespace cute;
    auto const base = Base::to_underlying_arguments(shape, args, workspace);
    auto const [m, n, k, l] = shape;
    return {base, args.overlap, args.once, m, n, m / kTileRowsA, n / kTileRowsB,
            rest<kBoxRowsA>(base.tma_load_a, args.ptr_A, m, k, l, get<0>(args.dA), get<2>(args.dA)),
            rest<kBoxRowsB>(base.tma_load_b, args.ptr_B, n, k, l, get<0>(args.dB), get<2>(args.dB))};
  }

 private:
  // The operand's tensor map, with boxes of the rows that are left when it is cut into those of the main loop.
  template <int BoxRows, class Load>
  static cute::TmaDescriptor rest(Load const& load, void const* address, int rows, int k, int l, int64_t stride_rows,
                                  int64_t stride_l) {
    using namespace cute;
    using Box = typename Load::AuxParams::TmaGmemBasis;
    static_assert(is_same_v<decltype(stride(Box{})), tuple<E<1>, E<0>, E<2>>>, "boxes of k, rows, slices");
    TmaDescriptor map = *load.get_tma_descriptor();
    if (rows % BoxRows == 0) return map;
    uint64_t const extents[] = {uint64_t(k), uint64_t(rows), uint64_t(l)};
    uint64_t const strides[] = {uint64_t(stride_rows), uint64_t(stride_l)};
    uint32_t const box[] = {uint32_t(size<0>(Box{})), uint32_t(rows % BoxRows), 1};
    uint32_t const step[] = {1, 1, 1};
    using Swizzle = typename Load::AuxParams::TmaSwizzle;
    cuTensorMapEncodeTiled(
        &map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 3, const_cast<void*>(address), extents, strides, box, step,
        CU_TENSOR_MAP_INTERLEAVE_NONE,
        TMA::to_CUtensorMapSwizzle(detail::get_tma_swizzle_bits(Swizzle{}), detail::get_tma_swizzle_base(Swizzle{})),
        CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    return map;
  }

 public:
#else

  CUTLASS_DEVICE static void prefetch_tma_descriptors(Params const& params) {
    Base::prefetch_tma_descriptors(params);
    if (params.rows_a % kBoxRowsA) cute::prefetch_tma_descriptor(&params.rest_a);
    if (params.rows_b % kBoxRowsB) cute::prefetch_tma_descriptor(&params.rest_b);
  }

  template <class Inputs, class BlockCoord, class KTileIterator>
  CUTLASS_DEVICE void load(Params const& params, MainloopPipeline pipeline, PipelineState state, Inputs const& inputs,
                           BlockCoord const& block_coord, KTileIterator k_tile, int k_tiles, int, uint32_t rank,
                           TensorStorage& storage) {
    bool const first = !waited_;
    waited_ = true;
    if (!cute::elect_one_sync()) return;
    auto const [m, n, l] = tile_coord(block_coord);
    uint32_t const block = Slices == 1 ? rank : 0;
    // Most tiles are whole; to look at each row's place would delay every one of them.
    if (m < params.whole_a && n < params.whole_b) {
      fill<true>(params, pipeline, state, inputs, m, n, l, k_tile, k_tiles, first, block, storage);
    } else {
      fill<false>(params, pipeline, state, inputs, m, n, l, k_tile, k_tiles, first, block, storage);
    }
  }

  template <class Accumulators>
  CUTLASS_DEVICE void mma(MainloopPipeline pipeline, PipelineState state, Accumulators& accumulators, int k_tiles,
                          int thread, TensorStorage& storage, Params const& params) {
    // The epilogue of these threads reads scales, and overwrites what earlier grids may be reading.
    if (!waited_) wait_for_preceding_grids();
    waited_ = true;
    Base::mma(pipeline, state, accumulators, k_tiles, thread, storage, params);
  }

 private:
  bool waited_ = false;

  // Loads the operands' tiles m and n of slice l, as block `block` of the cluster.
  template <bool Whole, class Inputs, class KTileIterator>
  CUTLASS_DEVICE static void fill(Params const& params, MainloopPipeline& pipeline, PipelineState state,
                                  Inputs const& inputs, int m, int n, int l, KTileIterator k_tile, int k_tiles,
                                  bool first, uint32_t block, TensorStorage& storage) {
    using namespace cute;
    uint32_t const x = block % size<0>(Cluster{}), y = block / size<0>(Cluster{});
    auto const slice_a = params.tma_load_a.get_slice(y);
    auto const slice_b = params.tma_load_b.get_slice(x);
    Tensor const from_a = slice_a.partition_S(get<0>(inputs)(_, _, m, _, l));
    Tensor const from_b = slice_b.partition_S(get<1>(inputs)(_, _, n, _, l));
    Tensor const to_a =
        slice_a.partition_D(make_tensor(make_smem_ptr(storage.smem_A.data()), typename Base::SmemLayoutA{}));
    Tensor const to_b =
        slice_b.partition_D(make_tensor(make_smem_ptr(storage.smem_B.data()), typename Base::SmemLayoutB{}));

    // The blocks that receive what this one loads: those of its row of the cluster, and of its column.
    uint16_t row = 0, column = 0;
    Layout const blocks = Layout<Cluster>{};
    if constexpr (is_same_v<typename Base::GmemTiledCopyA, SM90_TMA_LOAD_MULTICAST>) {
      for (uint32_t i = 0; i < size<1>(Cluster{}); ++i) row |= uint16_t(1) << blocks(x, i, Int<0>{});
    }
    if constexpr (is_same_v<typename Base::GmemTiledCopyB, SM90_TMA_LOAD_MULTICAST>) {
      for (uint32_t i = 0; i < size<0>(Cluster{}); ++i) column |= uint16_t(1) << blocks(i, y, Int<0>{});
    }
    // The rows that there are of the box of each operand that this block loads.
    int const own_a = Whole ? kBoxRowsA : present(params.rows_a, m, kTileRowsA, y, kBoxRowsA);
    int const own_b = Whole ? kBoxRowsB : present(params.rows_b, n, kTileRowsB, x, kBoxRowsB);
    auto const* const map_a = own_a == kBoxRowsA ? params.tma_load_a.get_tma_descriptor() : &params.rest_a;
    auto const* const map_b = own_b == kBoxRowsB ? params.tma_load_b.get_tma_descriptor() : &params.rest_b;
    uint32_t const absent_a = kTileK * (kBoxRowsA - own_a), absent_b = kTileK * (kBoxRowsB - own_b);

    // Weights that one block reads need no place in L2 once they are read.
    auto const hint = params.once ? TMA::CacheHintSm90::EVICT_FIRST : TMA::CacheHintSm90::EVICT_NORMAL;
    auto const normal = TMA::CacheHintSm90::EVICT_NORMAL;
    auto const acquire = [&](PipelineState const& stage) {
      // Announces the bytes of both tiles to this block's barrier. What the boxes that it loads lack counts as come, by
      // its word, wherever they go: a block's barrier opens when all that load for it have acquired the stage, or else
      // blocks could get ahead of one another, and the empty barriers, which only count, would open too early.
      pipeline.producer_acquire(stage);
      auto* const barrier = pipeline.producer_get_barrier(stage);
      if (absent_a) count_as_come(barrier, row, absent_a);
      if (absent_b) count_as_come(barrier, column, absent_b);
    };
    auto const copy_a = [&](PipelineState const& stage, auto const& k) {
      if (own_a == 0) return;
      auto* const barrier = pipeline.producer_get_barrier(stage);
      copy(params.tma_load_a.with(map_a, *barrier, row, WeightsAreA ? hint : normal), from_a(_, _, _, k),
           to_a(_, _, _, stage.index()));
    };
    auto const copy_b = [&](PipelineState const& stage, auto const& k) {
      if (own_b == 0) return;
      auto* const barrier = pipeline.producer_get_barrier(stage);
      copy(params.tma_load_b.with(map_b, *barrier, column, WeightsAreA ? normal : hint), from_b(_, _, _, k),
           to_b(_, _, _, stage.index()));
    };

    if (first) {
      int const early = params.overlap == kWeights ? cute::min(k_tiles, int(DispatchPolicy::Stages)) : 0;
      auto stage = state;
      auto tile = k_tile;
      CUTLASS_PRAGMA_NO_UNROLL
      for (int i = 0; i < early; ++i, ++stage, ++tile) {
        acquire(stage);  // the barrier opens when the activations have come too
        if constexpr (WeightsAreA) copy_a(stage, *tile);
        else copy_b(stage, *tile);
      }
      wait_for_preceding_grids();
      CUTLASS_PRAGMA_NO_UNROLL
      for (int i = 0; i < early; ++i, ++state, ++k_tile) {
        if constexpr (WeightsAreA) copy_b(state, *k_tile);
        else copy_a(state, *k_tile);
      }
      k_tiles -= early;
    }
    CUTLASS_PRAGMA_NO_UNROLL
    for (; k_tiles > 0; --k_tiles, ++state, ++k_tile) {
      acquire(state);
      copy_a(state, *k_tile);
      copy_b(state, *k_tile);
    }
  }

  // How many rows there are of a box of a tile.
  CUTLASS_DEVICE static int present(int rows, int tile, int tile_rows, int box, int box_rows) {
    int64_t const left = rows - (int64_t(tile) * tile_rows + box * box_rows);
    return left <= 0 ? 0 : left < box_rows ? int(left) : box_rows;
  }

  // Takes bytes off what the barrier waits for, in the blocks of the mask; in this one if there is no multicast.
  CUTLASS_DEVICE static void count_as_come(typename MainloopPipeline::ProducerBarrierType* barrier, uint16_t blocks,
                                           uint32_t bytes) {
    using Barrier = cutlass::arch::ClusterTransactionBarrier;
    if (blocks == 0) {
      Barrier::complete_transaction(barrier, cute::block_rank_in_cluster(), bytes);
      return;
    }
    CUTLASS_PRAGMA_UNROLL
    for (uint32_t i = 0; i < cute::size(Cluster{}); ++i) {
      if (blocks >> i & 1) Barrier::complete_transaction(barrier, i, bytes);
    }
  }

  // The tile's m and n, and the slice of k.
  template <class BlockCoord>
  CUTLASS_DEVICE static auto tile_coord(BlockCoord const& coord) {
    if constexpr (Slices == 1) {
      return cute::make_tuple(cute::get<0>(coord), cute::get<1>(coord), cute::get<3>(coord));
    } else {
      int const m = cute::get<0>(coord);
      return cute::make_tuple(m / Slices, cute::get<1>(coord), m % Slices);
    }
  }

#endif
};

// Where the blocks of a cluster leave their sums of a tile: at the start of the first block's shared memory, ahead of
// what the kernel itself uses. 128 threads hold the sums of a tile, each writes four at once.
template <class Accumulator, int TileSize, int Slices>
struct Exchange {
  using Sums = cutlass::AlignedArray<Accumulator, 4>;

  uint64_t full;
  alignas(128) Sums sums[Slices - 1][TileSize / 4];

  // The kernel's own shared memory follows and is aligned to this.
  static constexpr int kBytes = (128 + sizeof(sums) + 1023) / 1024 * 1024;
};

// A collective epilogue of CUTLASS that first adds up the sums of the cluster's blocks, in the order of their slices;
// the first block then stores the tile. Blocks have 128 threads that multiply.
template <class Base, class Exchange, int Slices>
struct SlicedEpilogue : Base {
  using Base::Base;

  // The slices are one output.
  template <class ProblemShape, class Arguments>
  static constexpr auto to_underlying_arguments(ProblemShape shape, Arguments const& args, void* workspace) {
    cute::get<3>(shape) = 1;
    return Base::to_underlying_arguments(shape, args, workspace);
  }

#if defined(__CUDACC__)

  // One thread of a block calls it before the cluster's first barrier.
  CUTLASS_DEVICE static void prepare(Exchange& exchange) {
    cutlass::arch::ClusterTransactionBarrier::init(&exchange.full, 1);
    if (cute::block_rank_in_cluster() == 0) {
      cutlass::arch::ClusterTransactionBarrier::arrive_and_expect_tx(&exchange.full, sizeof(exchange.sums));
    }
    cutlass::arch::fence_barrier_init();
  }

  template <class LoadPipeline, class LoadState, class StorePipeline, class StoreState, class ProblemShape, class Tile,
            class Coord, class Engine, class Layout, class TiledMma, class Storage>
  CUTLASS_DEVICE auto store(LoadPipeline load_pipeline, LoadState load_state, StorePipeline store_pipeline,
                            StoreState store_state, ProblemShape shape, Tile tile, Coord coord,
                            cute::Tensor<Engine, Layout> accumulators, TiledMma mma, int thread, Storage& storage) {
    constexpr int kSums = decltype(cute::size(accumulators))::value / 4;
    static_assert(kSums * 4 * 128 * 4 * (Slices - 1) == sizeof(Exchange::sums), "one warp group multiplies");
    extern __shared__ char shared_memory[];
    auto& exchange = *reinterpret_cast<Exchange*>(shared_memory);
    uint32_t const rank = cute::block_rank_in_cluster();
    if (rank != 0) {
      uint32_t const full = remote(&exchange.full);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kSums; ++i) {
        asm volatile(
            "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], { %1, %2, %3, %4 }, [%5];" ::"r"(
                remote(&exchange.sums[rank - 1][i * 128 + thread])),
            "r"(bits(accumulators(4 * i))), "r"(bits(accumulators(4 * i + 1))), "r"(bits(accumulators(4 * i + 2))),
            "r"(bits(accumulators(4 * i + 3))), "r"(full)
            : "memory");
      }
      return cute::make_tuple(load_state, store_state);
    }
    wait(&exchange.full);
    CUTLASS_PRAGMA_UNROLL
    for (int from = 1; from < Slices; ++from) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kSums; ++i) {
        auto const sums = exchange.sums[from - 1][i * 128 + thread];
        CUTLASS_PRAGMA_UNROLL
        for (int j = 0; j < 4; ++j) accumulators(4 * i + j) += sums[j];
      }
    }
    cute::get<3>(shape) = 1;
    int const m = cute::get<0>(coord);
    auto const tile_coord = cute::make_coord(m / Slices, cute::get<1>(coord), cute::_, 0);
    return Base::store(load_pipeline, load_state, store_pipeline, store_state, shape, tile, tile_coord, accumulators, mma,
                       thread, storage);
  }

 private:
  // Waits for the barrier's first phase, and acquires what other blocks of the cluster released to it.
  CUTLASS_DEVICE static void wait(uint64_t* barrier) {
    uint32_t const address = cute::cast_smem_ptr_to_uint(barrier);
    uint32_t done;
    do {
      asm volatile(
          "{ .reg .pred p; mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], 0; selp.u32 %0, 1, 0, p; }"
          : "=r"(done)
          : "r"(address)
          : "memory");
    } while (!done);
  }

  template <class Value>
  CUTLASS_DEVICE static uint32_t bits(Value value) {
    return reinterpret_cast<uint32_t const&>(value);
  }

  // The address of the first block's copy of a shared variable.
  template <class Value>
  CUTLASS_DEVICE static uint32_t remote(Value* local) {
    uint32_t address;
    asm volatile("mapa.shared::cluster.u32 %0, %1, 0;" : "=r"(address) : "r"(cute::cast_smem_ptr_to_uint(local)));
    return address;
  }

#endif
};

}  // namespace w8a8
