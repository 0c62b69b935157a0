// sm90_int8_bf16_azp-token-bias_token_channel_128x128x128_2x1_pingpong
//
//   D[m,n] = bf16(fma(scale_a[m], (scale_b[n] * (acc[m,n] - (azp[m] * azp_adj[n]))), bias[n]))
//
// Emitted by cutlass_w8a8 from this specification:
//   arch        sm90 (arch=compute_90a,code=sm_90a)
//   operands    A and B int8, accumulated in int32
//   output      bf16
//   epilogue    azp-token-bias_token_channel
//   tile        128x128x128
//   config      128x128x128_2x1_pingpong
//
// The epilogue's visitor tree:
//   store D[m,n] as bf16
//   └─ fma: fp32
//      ├─ scale_a[m]: fp32
//      ├─ *: fp32
//      │  ├─ scale_b[n]: fp32
//      │  └─ -: int32
//      │     ├─ acc[m,n]: int32
//      │     └─ *: int32
//      │        ├─ azp[m]: int32
//      │        └─ azp_adj[n]: int32
//      └─ bias[n]: bf16
//
// Regenerate this text with:
//   cutlass-w8a8 show --arch sm90 --a-dtype int8 --out-dtype bf16 --epilogue azp-token-bias_token_channel --config 128x128x128_2x1_pingpong

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
#include "cutlass/gemm/kernel/sm90_gemm_tma_warpspecialized_pingpong.hpp"

#include "hopper.h"

namespace {

using cute::_0;
using cute::_1;

// Types. D = epilogue(A @ B); A is row-major, B column-major: both contiguous along k.
using ElementA = int8_t;
using ElementB = int8_t;
using ElementAccumulator = int32_t;
using ElementCompute = float;
using StrideD = cute::Stride<int64_t, _1, _0>;  // row-major D
constexpr int kAlignmentAB = 16 / sizeof(ElementA);

// Tiling and schedule.
using TileShape = cute::Shape<cute::_128, cute::_128, cute::_128>;
using ClusterShape = cute::Shape<cute::_2, cute::_1, _1>;
using KernelSchedule = cutlass::gemm::KernelTmaWarpSpecializedPingpong;
using EpilogueSchedule = cutlass::epilogue::TmaWarpSpecialized;
using EpilogueTile = cutlass::epilogue::collective::EpilogueTileAuto;
using TileScheduler = cutlass::gemm::PersistentScheduler;

// Epilogue: the visitor tree, leaves first.
struct EpilogueDescriptor {
  using TileShape = ::TileShape;
};

using Accum = cutlass::epilogue::fusion::Sm90AccFetch;

using Azp = cutlass::epilogue::fusion::Sm90ColBroadcast<
    0 /*Stages*/, typename EpilogueDescriptor::TileShape, int32_t, int32_t,
    cute::Stride<cute::Int<1>, cute::Int<0>, cute::Int<0>>
>;

using AzpAdj = cutlass::epilogue::fusion::Sm90RowBroadcast<
    0 /*Stages*/, typename EpilogueDescriptor::TileShape, int32_t, int32_t,
    cute::Stride<cute::Int<0>, cute::Int<1>, cute::Int<0>>
>;

using Bias = cutlass::epilogue::fusion::Sm90RowBroadcast<
    0 /*Stages*/, typename EpilogueDescriptor::TileShape, cutlass::bfloat16_t, cutlass::bfloat16_t,
    cute::Stride<cute::Int<0>, cute::Int<1>, cute::Int<0>>
>;

using MulAzp = cutlass::epilogue::fusion::Sm90Compute<
    cutlass::multiplies, int32_t, int32_t,
    cutlass::FloatRoundStyle::round_to_nearest
>;

using EVTMulAzp = cutlass::epilogue::fusion::Sm90EVT<
    MulAzp,
    Azp,
    AzpAdj>;

using ScaleA = cutlass::epilogue::fusion::Sm90ColBroadcast<
    0 /*Stages*/, typename EpilogueDescriptor::TileShape, float, float,
    cute::Stride<cute::Int<1>, cute::Int<0>, cute::Int<0>>
>;

using ScaleB = cutlass::epilogue::fusion::Sm90RowBroadcast<
    0 /*Stages*/, typename EpilogueDescriptor::TileShape, float, float,
    cute::Stride<cute::Int<0>, cute::Int<1>, cute::Int<0>>
>;

using SubMulAzp = cutlass::epilogue::fusion::Sm90Compute<
    cutlass::minus, int32_t, int32_t,
    cutlass::FloatRoundStyle::round_to_nearest
>;

using EVTSubMulAzp = cutlass::epilogue::fusion::Sm90EVT<
    SubMulAzp,
    Accum,
    EVTMulAzp>;

using MulScaleB = cutlass::epilogue::fusion::Sm90Compute<
    cutlass::multiplies, float, float,
    cutlass::FloatRoundStyle::round_to_nearest
>;

using EVTMulScaleB = cutlass::epilogue::fusion::Sm90EVT<
    MulScaleB,
    ScaleB,
    EVTSubMulAzp>;

using FmaScaleA = cutlass::epilogue::fusion::Sm90Compute<
    cutlass::multiply_add, cutlass::bfloat16_t, float,
    cutlass::FloatRoundStyle::round_to_nearest
>;

using EVTFmaScaleA = cutlass::epilogue::fusion::Sm90EVT<
    FmaScaleA,
    ScaleA,
    EVTMulScaleB,
    Bias>;

using ElementD = cutlass::bfloat16_t;

constexpr int kAlignmentD = 16 / sizeof(ElementD);

// No C operand: its shared memory goes to main loop stages.
using CollectiveEpilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp,
    TileShape, ClusterShape, EpilogueTile,
    ElementAccumulator, ElementCompute,
    void, StrideD, kAlignmentD,
    ElementD, StrideD, kAlignmentD,
    EpilogueSchedule,
    EVTFmaScaleA>::CollectiveOp;

// Main loop.
using Stages = cutlass::gemm::collective::StageCountAutoCarveout<
    static_cast<int>(sizeof(typename CollectiveEpilogue::SharedStorage))>;

using TileMainloop = typename cutlass::gemm::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp,
    ElementA, cutlass::layout::RowMajor, kAlignmentAB,
    ElementB, cutlass::layout::ColumnMajor, kAlignmentAB,
    ElementAccumulator,
    TileShape, ClusterShape,
    Stages,
    KernelSchedule>::CollectiveOp;
using CollectiveMainloop =
    w8a8::Mainloop<TileMainloop, /*WeightsAreA=*/false, /*Slices=*/1>;

using GemmKernel = cutlass::gemm::kernel::GemmUniversal<
    cute::Shape<int, int, int, int>, CollectiveMainloop, CollectiveEpilogue, TileScheduler>;

using Params = typename GemmKernel::Params;

}  // namespace

#if defined(__CUDACC__)

extern "C" __global__ void __launch_bounds__(GemmKernel::MaxThreadsPerBlock, GemmKernel::MinBlocksPerMultiprocessor)
w8a8_kernel(__grid_constant__ Params const params) {
  if (params.mainloop.overlap != w8a8::kNone) w8a8::start_dependent_grids();
  extern __shared__ char shared_memory[];
  GemmKernel{}(params, shared_memory);
}

#else  // the host half, for a plain C++ compiler; host_prelude.h declares Call, Info and the driver's functions

namespace {

typename GemmKernel::Arguments arguments(Call const& call) {
  auto const* scale_a = static_cast<float const*>(call.operand[0]);
  auto const* scale_b = static_cast<float const*>(call.operand[1]);
  auto const* azp = static_cast<int32_t const*>(call.operand[2]);
  auto const* azp_adj = static_cast<int32_t const*>(call.operand[3]);
  auto const* bias = static_cast<cutlass::bfloat16_t const*>(call.operand[4]);
  typename CollectiveEpilogue::FusionCallbacks::Arguments const epilogue =
      {
        {scale_a, float(0), {}},  // scale_a[m]
        {
          {scale_b, float(0), {}},  // scale_b[n]
          {
            {},  // accumulator
            {
              {azp, int32_t(0), {}},  // azp[m]
              {azp_adj, int32_t(0), {}},  // azp_adj[n]
              {}
            },  // mul_azp
            {}
          },  // sub_mul_azp
          {}
        },  // mul_scale_b
        {bias, cutlass::bfloat16_t(0), {}},  // bias[n]
        {}
      };  // fma_scale_a

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
  scheduler.raster_order = call.raster == 1   ? RasterOrder::AlongM
                           : call.raster == 2 ? RasterOrder::AlongN
                                              : RasterOrder::Heuristic;

  return {cutlass::gemm::GemmUniversalMode::kGemm,
          {call.m, call.n, call.k, 1},
          {{a, {call.lda, _1{}, _0{}}, b, {call.ldb, _1{}, _0{}}}, call.overlap, call.m <= 256},
          {epilogue, nullptr, {call.ldd, _1{}, _0{}}, d, {call.ldd, _1{}, _0{}}},
          hardware,
          scheduler};
}

}  // namespace

extern "C" W8A8_EXPORT Info const w8a8_info = {
    W8A8_ABI_VERSION,
    static_cast<int32_t>(GemmKernel::SharedStorageSize),
    static_cast<int32_t>(GemmKernel::MaxThreadsPerBlock),
    static_cast<int32_t>(sizeof(Params)),
    /*operands=*/5};

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
  if (int const refused = w8a8::refused(call, 5)) return refused;
  dim3 const cluster(2, 1, 1);
  static thread_local w8a8::Recent<Params> recent;
  auto& entry = recent.at(kept);
  if (!entry.holds(call)) {
    auto const args = arguments(call);
    Params params = GemmKernel::to_underlying_arguments(args, call.workspace);
    if (w8a8::map_error) return std::exchange(w8a8::map_error, 0);
    dim3 const grid = GemmKernel::get_grid_shape(params);
    entry.set(call, params, grid);
  }
  dim3 const grid(entry.grid[0], entry.grid[1], entry.grid[2]);
  return w8a8::launch(call, entry.params, grid, GemmKernel::MaxThreadsPerBlock, GemmKernel::SharedStorageSize, cluster,
                      /*dependent=*/call.overlap != w8a8::kNone);
}

#endif
