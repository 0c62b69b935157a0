// sm90_e4m3_bf16_scaled_token_channel_64x16x256_1x1_ws_swap_slices4
//
//   D[m,n] = bf16(scale_a[m] * (scale_b[n] * acc[m,n]))
//
// Emitted by cutlass_w8a8 from this specification:
//   arch        sm90 (arch=compute_90a,code=sm_90a)
//   operands    A and B e4m3, accumulated in fp32
//   output      bf16
//   epilogue    scaled_token_channel
//   tile        64x16x256 of the transposed problem
//   config      64x16x256_1x1_ws_swap_slices4
//
// The epilogue's visitor tree:
//   store D[m,n] as bf16
//   └─ *: fp32
//      ├─ scale_a[m]: fp32
//      └─ *: fp32
//         ├─ scale_b[n]: fp32
//         └─ acc[m,n]: fp32
//
// Regenerate this text with:
//   cutlass-w8a8 show --arch sm90 --a-dtype e4m3 --out-dtype bf16 --epilogue scaled_token_channel --config 64x16x256_1x1_ws_swap_slices4

#include "cutlass/cutlass.h"
#include "cutlass/device_kernel.h"
#include "cutlass/functional.h"
#include "cutlass/kernel_hardware_info.hpp"
#include "cutlass/numeric_conversion.h"
#include "cutlass/numeric_types.h"

#include "cutlass/gemm/dispatch_policy.hpp"
#include "cutlass/gemm/gemm.h"
#include "cutlass/gemm/collective/collective_mma_decl.hpp"
#include "cutlass/gemm/collective/sm90_mma_tma_gmma_ss_warpspecialized.hpp"
#include "cutlass/gemm/collective/collective_builder_decl.hpp"
#include "cutlass/gemm/collective/builders/sm90_gmma_builder.inl"

#include "cutlass/epilogue/collective/collective_builder.hpp"
#include "cutlass/epilogue/fusion/sm90_callbacks_tma_warpspecialized.hpp"

#include "cutlass/gemm/kernel/gemm_universal_decl.h"
#include "cutlass/gemm/kernel/tile_scheduler.hpp"
#include "cutlass/gemm/kernel/gemm_universal.hpp"

#include "hopper.h"

namespace {

using cute::_0;
using cute::_1;

// Types. D = epilogue(A @ B); the kernel computes D^T = B^T @ A^T, so its first operand is the caller's B.
using ElementA = cutlass::float_e4m3_t;
using ElementB = cutlass::float_e4m3_t;
using ElementAccumulator = float;
using ElementCompute = float;
using StrideD = cute::Stride<_1, int64_t, _0>;  // row-major D, seen transposed
constexpr int kAlignmentAB = 16 / sizeof(ElementA);

// Tiling and schedule.
using TileShape = cute::Shape<cute::_64, cute::_16, cute::_256>;
using ClusterShape = cute::Shape<cute::_1, cute::_1, _1>;
using KernelSchedule = cutlass::gemm::KernelTmaWarpSpecializedFP8FastAccum;
using EpilogueSchedule = cutlass::epilogue::TmaWarpSpecialized;
using EpilogueTile = cutlass::epilogue::collective::EpilogueTileAuto;
using TileScheduler = cutlass::gemm::PersistentScheduler;

// Epilogue: the visitor tree, leaves first.
struct EpilogueDescriptor {
  using TileShape = ::TileShape;
};

using Accum = cutlass::epilogue::fusion::Sm90AccFetch;

using ScaleA = cutlass::epilogue::fusion::Sm90RowBroadcast<
    0 /*Stages*/, typename EpilogueDescriptor::TileShape, float, float,
    cute::Stride<cute::Int<0>, cute::Int<1>, cute::Int<0>>
>;

using ScaleB = cutlass::epilogue::fusion::Sm90ColBroadcast<
    0 /*Stages*/, typename EpilogueDescriptor::TileShape, float, float,
    cute::Stride<cute::Int<1>, cute::Int<0>, cute::Int<0>>
>;

using MulScaleB = cutlass::epilogue::fusion::Sm90Compute<
    cutlass::multiplies, float, float,
    cutlass::FloatRoundStyle::round_to_nearest
>;

using EVTMulScaleB = cutlass::epilogue::fusion::Sm90EVT<
    MulScaleB,
    ScaleB,
    Accum>;

using MulScaleA = cutlass::epilogue::fusion::Sm90Compute<
    cutlass::multiplies, cutlass::bfloat16_t, float,
    cutlass::FloatRoundStyle::round_to_nearest
>;

using EVTMulScaleA = cutlass::epilogue::fusion::Sm90EVT<
    MulScaleA,
    ScaleA,
    EVTMulScaleB>;

using ElementD = cutlass::bfloat16_t;

constexpr int kAlignmentD = 16 / sizeof(ElementD);

// Blocks of a cluster divide k; their sums meet here.
constexpr int kSlices = 4;
using Exchange = w8a8::Exchange<ElementAccumulator, 1024, kSlices>;

// No C operand: its shared memory goes to main loop stages.
using TileEpilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp,
    TileShape, ClusterShape, EpilogueTile,
    ElementAccumulator, ElementCompute,
    void, StrideD, kAlignmentD,
    ElementD, StrideD, kAlignmentD,
    EpilogueSchedule,
    EVTMulScaleA>::CollectiveOp;
using CollectiveEpilogue = w8a8::SlicedEpilogue<TileEpilogue, Exchange, kSlices>;

// Main loop.
using Stages = cutlass::gemm::collective::StageCountAutoCarveout<
    static_cast<int>(sizeof(typename CollectiveEpilogue::SharedStorage)) + Exchange::kBytes>;

using TileMainloop = typename cutlass::gemm::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp,
    ElementA, cutlass::layout::RowMajor, kAlignmentAB,
    ElementB, cutlass::layout::ColumnMajor, kAlignmentAB,
    ElementAccumulator,
    TileShape, ClusterShape,
    Stages,
    KernelSchedule>::CollectiveOp;
using CollectiveMainloop =
    w8a8::Mainloop<TileMainloop, /*WeightsAreA=*/true, /*Slices=*/kSlices>;

using GemmKernel = cutlass::gemm::kernel::GemmUniversal<
    cute::Shape<int, int, int, int>, CollectiveMainloop, CollectiveEpilogue, TileScheduler>;

using Params = typename GemmKernel::Params;

}  // namespace

#if defined(__CUDACC__)

extern "C" __global__ void __launch_bounds__(GemmKernel::MaxThreadsPerBlock, GemmKernel::MinBlocksPerMultiprocessor)
w8a8_kernel(__grid_constant__ Params const params) {
  if (params.mainloop.overlap != w8a8::kNone) w8a8::start_dependent_grids();
  extern __shared__ char shared_memory[];
  if (threadIdx.x == 0) CollectiveEpilogue::prepare(*reinterpret_cast<Exchange*>(shared_memory));
  GemmKernel{}(params, shared_memory + Exchange::kBytes);
}

#else  // the host half, for a plain C++ compiler; host_prelude.h declares Call, Info and the driver's functions

namespace {

typename GemmKernel::Arguments arguments(Call const& call) {
  auto const* scale_a = static_cast<float const*>(call.operand[0]);
  auto const* scale_b = static_cast<float const*>(call.operand[1]);
  typename CollectiveEpilogue::FusionCallbacks::Arguments const epilogue =
      {
        {scale_a, float(0), {}},  // scale_a[m]
        {
          {scale_b, float(0), {}},  // scale_b[n]
          {},  // accumulator
          {}
        },  // mul_scale_b
        {}
      };  // mul_scale_a

  auto const* a = static_cast<ElementA const*>(call.a);
  auto const* b = static_cast<ElementB const*>(call.b);
  auto* d = static_cast<ElementD*>(call.d);

  cutlass::KernelHardwareInfo hardware;
  hardware.device_id = 0;  // read only to query what the next line gives
  hardware.sm_count = call.sm_count;

  typename GemmKernel::TileSchedulerArguments scheduler;
  if constexpr (!std::is_const_v<decltype(scheduler.max_swizzle_size)>) {
    scheduler.max_swizzle_size = call.swizzle;
  }
  using RasterOrder = decltype(scheduler.raster_order);
  // The kernel's m is the caller's n.
  scheduler.raster_order = call.raster == 1   ? RasterOrder::AlongN
                           : call.raster == 2 ? RasterOrder::AlongM
                                              : RasterOrder::Heuristic;

  int32_t const slice = call.k / kSlices;
  return {cutlass::gemm::GemmUniversalMode::kGemm,
          {call.n, call.m, slice, kSlices},
          {{b, {call.ldb, _1{}, slice}, a, {call.lda, _1{}, slice}}, call.overlap, call.m <= 16},
          {epilogue, nullptr, {_1{}, call.ldd, _0{}}, d, {_1{}, call.ldd, _0{}}},
          hardware,
          scheduler};
}

}  // namespace

extern "C" W8A8_EXPORT Info const w8a8_info = {
    W8A8_ABI_VERSION,
    static_cast<int32_t>(GemmKernel::SharedStorageSize + Exchange::kBytes),
    static_cast<int32_t>(GemmKernel::MaxThreadsPerBlock),
    static_cast<int32_t>(sizeof(Params)),
    /*operands=*/2};

// Bytes of workspace the call needs, or kCannotImplement when CUTLASS refuses the problem.
extern "C" W8A8_EXPORT int64_t w8a8_workspace(Call const* call) {
  auto const args = arguments(*call);
  if (!GemmKernel::can_implement(args)) return w8a8::kCannotImplement;
  return static_cast<int64_t>(GemmKernel::get_workspace_size(args));
}

// Launches the kept call with these pointers.
extern "C" W8A8_EXPORT int w8a8_launch(Call const* kept, Pointers const* pointers) {
  Call call = *kept;
  static_cast<Pointers&>(call) = *pointers;
  if (int const refused = w8a8::refused(call, 2)) return refused;
  dim3 const cluster(4, 1, 1);
  static thread_local w8a8::Recent<Params> recent;
  auto& entry = recent.at(kept);
  if (!entry.holds(call)) {
    auto const args = arguments(call);
    Params params = GemmKernel::to_underlying_arguments(args, call.workspace);
    if (w8a8::map_error) return std::exchange(w8a8::map_error, 0);
    // Blocks along x are slices of the tiles along m.
    dim3 const grid(cute::ceil_div(cute::get<0>(args.problem_shape), 64) * kSlices,
                    cute::ceil_div(cute::get<1>(args.problem_shape), 16), 1);
    entry.set(call, params, grid);
  }
  dim3 const grid(entry.grid[0], entry.grid[1], entry.grid[2]);
  return w8a8::launch(call, entry.params, grid, GemmKernel::MaxThreadsPerBlock, GemmKernel::SharedStorageSize + Exchange::kBytes, cluster,
                      /*dependent=*/call.overlap != w8a8::kNone);
}

#endif
