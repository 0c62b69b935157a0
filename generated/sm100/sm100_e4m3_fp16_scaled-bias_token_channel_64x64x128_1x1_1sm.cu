// sm100_e4m3_fp16_scaled-bias_token_channel_64x64x128_1x1_1sm
//
//   D[m,n] = fp16(fma(scale_a[m], (scale_b[n] * acc[m,n]), bias[n]))
//
// Emitted by cutlass_w8a8 from this specification:
//   arch        sm100 (arch=compute_100a,code=sm_100a)
//   operands    A and B e4m3, accumulated in fp32
//   output      fp16
//   epilogue    scaled-bias_token_channel
//   tile        64x64x128
//   config      64x64x128_1x1_1sm
//
// The epilogue's visitor tree:
//   store D[m,n] as fp16
//   └─ fma: fp32
//      ├─ scale_a[m]: fp32
//      ├─ *: fp32
//      │  ├─ scale_b[n]: fp32
//      │  └─ acc[m,n]: fp32
//      └─ bias[n]: fp16
//
// Regenerate this text with:
//   cutlass-w8a8 show --arch sm100 --a-dtype e4m3 --out-dtype fp16 --epilogue scaled-bias_token_channel --config 64x64x128_1x1_1sm

#include "cutlass/cutlass.h"
#include "cutlass/device_kernel.h"
#include "cutlass/functional.h"
#include "cutlass/kernel_hardware_info.hpp"
#include "cutlass/numeric_conversion.h"
#include "cutlass/numeric_types.h"

#include "cutlass/gemm/collective/collective_builder.hpp"
#include "cutlass/epilogue/collective/collective_builder.hpp"
#include "cutlass/gemm/kernel/gemm_universal.hpp"

namespace {

using cute::_0;
using cute::_1;

// Types. D = epilogue(A @ B); A is row-major, B column-major: both contiguous along k.
using ElementA = cutlass::float_e4m3_t;
using ElementB = cutlass::float_e4m3_t;
using ElementAccumulator = float;
using ElementCompute = float;
using StrideD = cute::Stride<int64_t, _1, _0>;  // row-major D
constexpr int kAlignmentAB = 16 / sizeof(ElementA);

// Tiling and schedule.
using TileShape = cute::Shape<cute::_64, cute::_64, cute::_128>;
using ClusterShape = cute::Shape<cute::_1, cute::_1, _1>;
using KernelSchedule = cutlass::gemm::KernelTmaWarpSpecialized1SmSm100;
using EpilogueSchedule = cutlass::epilogue::TmaWarpSpecialized1Sm;
using EpilogueTile = cutlass::epilogue::collective::EpilogueTileAuto;
using TileScheduler = cutlass::gemm::PersistentScheduler;

// Epilogue: the visitor tree, leaves first.
struct EpilogueDescriptor {
  using TileShape = ::TileShape;
};

using Accum = cutlass::epilogue::fusion::Sm90AccFetch;

using Bias = cutlass::epilogue::fusion::Sm90RowBroadcast<
    0 /*Stages*/, typename EpilogueDescriptor::TileShape, cutlass::half_t, cutlass::half_t,
    cute::Stride<cute::Int<0>, cute::Int<1>, cute::Int<0>>
>;

using ScaleA = cutlass::epilogue::fusion::Sm90ColBroadcast<
    0 /*Stages*/, typename EpilogueDescriptor::TileShape, float, float,
    cute::Stride<cute::Int<1>, cute::Int<0>, cute::Int<0>>
>;

using ScaleB = cutlass::epilogue::fusion::Sm90RowBroadcast<
    0 /*Stages*/, typename EpilogueDescriptor::TileShape, float, float,
    cute::Stride<cute::Int<0>, cute::Int<1>, cute::Int<0>>
>;

using MulScaleB = cutlass::epilogue::fusion::Sm90Compute<
    cutlass::multiplies, float, float,
    cutlass::FloatRoundStyle::round_to_nearest
>;

using EVTMulScaleB = cutlass::epilogue::fusion::Sm90EVT<
    MulScaleB,
    ScaleB,
    Accum>;

using FmaScaleA = cutlass::epilogue::fusion::Sm90Compute<
    cutlass::multiply_add, cutlass::half_t, float,
    cutlass::FloatRoundStyle::round_to_nearest
>;

using EVTFmaScaleA = cutlass::epilogue::fusion::Sm90EVT<
    FmaScaleA,
    ScaleA,
    EVTMulScaleB,
    Bias>;

using ElementD = cutlass::half_t;

constexpr int kAlignmentD = 16 / sizeof(ElementD);

// No C operand: its shared memory goes to main loop stages.
using CollectiveEpilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
    cutlass::arch::Sm100, cutlass::arch::OpClassTensorOp,
    TileShape, ClusterShape, EpilogueTile,
    ElementAccumulator, ElementCompute,
    void, StrideD, kAlignmentD,
    ElementD, StrideD, kAlignmentD,
    EpilogueSchedule,
    EVTFmaScaleA>::CollectiveOp;

// Main loop.
using Stages = cutlass::gemm::collective::StageCountAutoCarveout<
    static_cast<int>(sizeof(typename CollectiveEpilogue::SharedStorage))>;

using CollectiveMainloop = typename cutlass::gemm::collective::CollectiveBuilder<
    cutlass::arch::Sm100, cutlass::arch::OpClassTensorOp,
    ElementA, cutlass::layout::RowMajor, kAlignmentAB,
    ElementB, cutlass::layout::ColumnMajor, kAlignmentAB,
    ElementAccumulator,
    TileShape, ClusterShape,
    Stages,
    KernelSchedule>::CollectiveOp;

using GemmKernel = cutlass::gemm::kernel::GemmUniversal<
    cute::Shape<int, int, int, int>, CollectiveMainloop, CollectiveEpilogue, TileScheduler>;

using Params = typename GemmKernel::Params;

}  // namespace

#if defined(__CUDACC__)

extern "C" __global__ void __launch_bounds__(GemmKernel::MaxThreadsPerBlock, GemmKernel::MinBlocksPerMultiprocessor)
w8a8_kernel(__grid_constant__ Params const params) {
  extern __shared__ char shared_memory[];
  GemmKernel{}(params, shared_memory);
}

#else  // the host half, for a plain C++ compiler; host_prelude.h declares Call, Info and the driver's functions

namespace {

typename GemmKernel::Arguments arguments(Call const& call) {
  auto const* scale_a = static_cast<float const*>(call.operand[0]);
  auto const* scale_b = static_cast<float const*>(call.operand[1]);
  auto const* bias = static_cast<cutlass::half_t const*>(call.operand[2]);
  typename CollectiveEpilogue::FusionCallbacks::Arguments const epilogue =
      {
        {scale_a, float(0), {}},  // scale_a[m]
        {
          {scale_b, float(0), {}},  // scale_b[n]
          {},  // accumulator
          {}
        },  // mul_scale_b
        {bias, cutlass::half_t(0), {}},  // bias[n]
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
          {a, {call.lda, _1{}, _0{}}, b, {call.ldb, _1{}, _0{}}},
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
    /*operands=*/3};

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
  if (int const refused = w8a8::refused(call, 3)) return refused;
  dim3 const cluster(1, 1, 1);
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
                      /*dependent=*/false);
}

#endif
