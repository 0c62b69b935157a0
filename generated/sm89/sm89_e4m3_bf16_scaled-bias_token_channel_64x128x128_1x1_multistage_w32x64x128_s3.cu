// sm89_e4m3_bf16_scaled-bias_token_channel_64x128x128_1x1_multistage_w32x64x128_s3
//
//   D[m,n] = bf16(fma(scale_a[m], (scale_b[n] * acc[m,n]), bias[n]))
//
// Emitted by cutlass_w8a8 from this specification:
//   arch        sm89 (arch=compute_89,code=[sm_89,compute_89])
//   operands    A and B e4m3, accumulated in fp32
//   output      bf16
//   epilogue    scaled-bias_token_channel
//   tile        64x128x128
//   config      64x128x128_1x1_multistage_w32x64x128_s3
//
// The epilogue's visitor tree:
//   store D[m,n] as bf16
//   └─ fma: fp32
//      ├─ scale_a[m]: fp32
//      ├─ *: fp32
//      │  ├─ scale_b[n]: fp32
//      │  └─ acc[m,n]: fp32
//      └─ bias[n]: bf16
//
// Regenerate this text with:
//   cutlass-w8a8 show --arch sm89 --a-dtype e4m3 --out-dtype bf16 --epilogue scaled-bias_token_channel --config 64x128x128_1x1_multistage_w32x64x128_s3

#include "cutlass/cutlass.h"
#include "cutlass/arch/arch.h"
#include "cutlass/arch/mma.h"
#include "cutlass/gemm_coord.h"
#include "cutlass/layout/matrix.h"
#include "cutlass/numeric_conversion.h"
#include "cutlass/numeric_types.h"

// The visitors use names that the default GEMM brings in, so it comes first.
#include "cutlass/gemm/kernel/default_gemm_universal.h"

#include "cutlass/epilogue/threadblock/fusion/visitors.hpp"
#include "cutlass/gemm/kernel/default_gemm_universal_with_visitor.h"

namespace {

// Types. D = epilogue(A @ B); A is row-major, B column-major: both contiguous along k.
using ElementA = cutlass::float_e4m3_t;
using ElementB = cutlass::float_e4m3_t;
using ElementAccumulator = float;
using ElementCompute = float;
constexpr int kAlignmentAB = 16 / sizeof(ElementA);

// The type CUTLASS plans D's memory accesses by; D's own type is in the visitor that stores it.
using ElementPlan = cutlass::bfloat16_t;
constexpr int kAlignmentPlan = 8;

// Tiling.
using BlockTile = cutlass::gemm::GemmShape<64, 128, 128>;
using WarpTile = cutlass::gemm::GemmShape<32, 64, 128>;
using Instruction = cutlass::gemm::GemmShape<16, 8, 32>;
using Swizzle = cutlass::gemm::threadblock::GemmIdentityThreadblockSwizzle<8>;
constexpr int kStages = 3;
constexpr int kEpilogueStages = 1;

// Epilogue: the visitor tree, leaves first; its root stores D.
using OutputTileThreadMap = cutlass::epilogue::threadblock::OutputTileThreadLayout<
    BlockTile, WarpTile, ElementPlan, kAlignmentPlan, kEpilogueStages>;

using Accum = cutlass::epilogue::threadblock::VisitorAccFetch;

using Bias = cutlass::epilogue::threadblock::VisitorRowBroadcast<
    OutputTileThreadMap, cutlass::bfloat16_t,
    cute::Stride<cute::Int<0>, cute::Int<1>, cute::Int<0>>
>;

using ScaleA = cutlass::epilogue::threadblock::VisitorColBroadcast<
    OutputTileThreadMap, float,
    cute::Stride<cute::Int<1>, cute::Int<0>, cute::Int<0>>
>;

using ScaleB = cutlass::epilogue::threadblock::VisitorRowBroadcast<
    OutputTileThreadMap, float,
    cute::Stride<cute::Int<0>, cute::Int<1>, cute::Int<0>>
>;

using MulScaleB = cutlass::epilogue::threadblock::VisitorCompute<
    cutlass::multiplies, float, float,
    cutlass::FloatRoundStyle::round_to_nearest
>;

using EVTMulScaleB = cutlass::epilogue::threadblock::Sm80EVT<
    MulScaleB,
    ScaleB,
    Accum>;

using FmaScaleA = cutlass::epilogue::threadblock::VisitorCompute<
    cutlass::multiply_add, cutlass::bfloat16_t, float,
    cutlass::FloatRoundStyle::round_to_nearest
>;

using EVTFmaScaleA = cutlass::epilogue::threadblock::Sm80EVT<
    FmaScaleA,
    ScaleA,
    EVTMulScaleB,
    Bias>;

using D = cutlass::epilogue::threadblock::VisitorAuxStore<
    OutputTileThreadMap, cutlass::bfloat16_t, cutlass::FloatRoundStyle::round_to_nearest,
    cute::Stride<int64_t, cute::Int<1>, cute::Int<0>>
>;

using EVTD = cutlass::epilogue::threadblock::Sm80EVT<
    D,
    EVTFmaScaleA>;

using GemmKernel = typename cutlass::gemm::kernel::DefaultGemmWithVisitor<
    ElementA, cutlass::layout::RowMajor, cutlass::ComplexTransform::kNone, kAlignmentAB,
    ElementB, cutlass::layout::ColumnMajor, cutlass::ComplexTransform::kNone, kAlignmentAB,
    ElementPlan, cutlass::layout::RowMajor, kAlignmentPlan,
    ElementAccumulator, ElementCompute,
    cutlass::arch::OpClassTensorOp, cutlass::arch::Sm89,
    BlockTile, WarpTile, Instruction,
    EVTD, Swizzle, kStages,
    cutlass::arch::OpMultiplyAddFastAccum, kEpilogueStages>::GemmKernel;
using SharedStorage = typename GemmKernel::SharedStorage;

using Params = typename GemmKernel::Params;

}  // namespace

#if defined(__CUDACC__)

extern "C" __global__ void __launch_bounds__(GemmKernel::kThreadCount, 1)
w8a8_kernel(__grid_constant__ Params const params) {
  extern __shared__ char shared_memory[];
  GemmKernel::invoke(params, *reinterpret_cast<SharedStorage*>(shared_memory));
}

#else  // the host half, for a plain C++ compiler; host_prelude.h declares Call, Info and the driver's functions

namespace {

typename GemmKernel::Arguments arguments(Call const& call) {
  auto const* scale_a = static_cast<float const*>(call.operand[0]);
  auto const* scale_b = static_cast<float const*>(call.operand[1]);
  auto const* bias = static_cast<cutlass::bfloat16_t const*>(call.operand[2]);
  auto* d = static_cast<cutlass::bfloat16_t*>(call.d);
  typename EVTD::Arguments const epilogue = {
      {
        {scale_a, float(0), {}},  // scale_a[m]
        {
          {scale_b, float(0), {}},  // scale_b[n]
          {},  // accumulator
          {}
        },  // mul_scale_b
        {bias, cutlass::bfloat16_t(0), {}},  // bias[n]
        {}
      },  // fma_scale_a
      {d, {call.ldd, cute::_1{}, cute::_0{}}}};

  // The visitor stores D: the GEMM's own C and D pointers are unused. Leading strides are 64-bit throughout.
  int64_t const no_batch = 0;
  return typename GemmKernel::Arguments(
      cutlass::gemm::GemmUniversalMode::kGemm, {call.m, call.n, call.k},
      /*batch_count=*/1, epilogue,
      call.a, call.b, nullptr, nullptr, no_batch, no_batch, no_batch, no_batch,
      call.lda, call.ldb, call.ldd, call.ldd);
}

}  // namespace

extern "C" W8A8_EXPORT Info const w8a8_info = {
    W8A8_ABI_VERSION,
    static_cast<int32_t>(sizeof(SharedStorage)),
    static_cast<int32_t>(GemmKernel::kThreadCount),
    static_cast<int32_t>(sizeof(Params)),
    /*operands=*/3};

// Bytes of workspace the call needs, or kCannotImplement when CUTLASS refuses the problem.
extern "C" W8A8_EXPORT int64_t w8a8_workspace(Call const* call) {
  auto const args = arguments(*call);
  if (GemmKernel::can_implement(args) != cutlass::Status::kSuccess) return w8a8::kCannotImplement;
  return static_cast<int64_t>(Params(args, call->sm_count, call->blocks_per_sm).get_workspace_size());
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
    Params params(args, call.sm_count, call.blocks_per_sm);
    dim3 const grid = params.get_grid_dims();
    entry.set(call, params, grid);
  }
  dim3 const grid(entry.grid[0], entry.grid[1], entry.grid[2]);
  return w8a8::launch(call, entry.params, grid, GemmKernel::kThreadCount, sizeof(SharedStorage), cluster,
                      /*dependent=*/false);
}

#endif
