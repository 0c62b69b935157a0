// sm103_int8_bf16_azp-token_token_channel_128x128x64_1x1_multistage_w64x64x64_s5
//
//   D[m,n] = bf16(scale_a[m] * (scale_b[n] * (acc[m,n] - (azp[m] * azp_adj[n]))))
//
// Emitted by cutlass_w8a8 from this specification:
//   arch        sm103 (arch=compute_103a,code=sm_103a)
//   operands    A and B int8, accumulated in int32
//   output      bf16
//   epilogue    azp-token_token_channel
//   tile        128x128x64
//   config      128x128x64_1x1_multistage_w64x64x64_s5
//
// The epilogue's visitor tree:
//   store D[m,n] as bf16
//   └─ *: fp32
//      ├─ scale_a[m]: fp32
//      └─ *: fp32
//         ├─ scale_b[n]: fp32
//         └─ -: int32
//            ├─ acc[m,n]: int32
//            └─ *: int32
//               ├─ azp[m]: int32
//               └─ azp_adj[n]: int32
//
// Regenerate this text with:
//   cutlass-w8a8 show --arch sm103 --a-dtype int8 --out-dtype bf16 --epilogue azp-token_token_channel --config 128x128x64_1x1_multistage_w64x64x64_s5

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
using ElementA = int8_t;
using ElementB = int8_t;
using ElementAccumulator = int32_t;
using ElementCompute = float;
constexpr int kAlignmentAB = 16 / sizeof(ElementA);

// The type CUTLASS plans D's memory accesses by; D's own type is in the visitor that stores it.
using ElementPlan = cutlass::bfloat16_t;
constexpr int kAlignmentPlan = 8;

// Tiling.
using BlockTile = cutlass::gemm::GemmShape<128, 128, 64>;
using WarpTile = cutlass::gemm::GemmShape<64, 64, 64>;
using Instruction = cutlass::gemm::GemmShape<16, 8, 32>;
using Swizzle = cutlass::gemm::threadblock::GemmIdentityThreadblockSwizzle<8>;
constexpr int kStages = 5;
constexpr int kEpilogueStages = 1;

// Epilogue: the visitor tree, leaves first; its root stores D.
using OutputTileThreadMap = cutlass::epilogue::threadblock::OutputTileThreadLayout<
    BlockTile, WarpTile, ElementPlan, kAlignmentPlan, kEpilogueStages>;

using Accum = cutlass::epilogue::threadblock::VisitorAccFetch;

using Azp = cutlass::epilogue::threadblock::VisitorColBroadcast<
    OutputTileThreadMap, int32_t,
    cute::Stride<cute::Int<1>, cute::Int<0>, cute::Int<0>>
>;

using AzpAdj = cutlass::epilogue::threadblock::VisitorRowBroadcast<
    OutputTileThreadMap, int32_t,
    cute::Stride<cute::Int<0>, cute::Int<1>, cute::Int<0>>
>;

using MulAzp = cutlass::epilogue::threadblock::VisitorCompute<
    cutlass::multiplies, int32_t, int32_t,
    cutlass::FloatRoundStyle::round_to_nearest
>;

using EVTMulAzp = cutlass::epilogue::threadblock::Sm80EVT<
    MulAzp,
    Azp,
    AzpAdj>;

using ScaleA = cutlass::epilogue::threadblock::VisitorColBroadcast<
    OutputTileThreadMap, float,
    cute::Stride<cute::Int<1>, cute::Int<0>, cute::Int<0>>
>;

using ScaleB = cutlass::epilogue::threadblock::VisitorRowBroadcast<
    OutputTileThreadMap, float,
    cute::Stride<cute::Int<0>, cute::Int<1>, cute::Int<0>>
>;

using SubMulAzp = cutlass::epilogue::threadblock::VisitorCompute<
    cutlass::minus, int32_t, int32_t,
    cutlass::FloatRoundStyle::round_to_nearest
>;

using EVTSubMulAzp = cutlass::epilogue::threadblock::Sm80EVT<
    SubMulAzp,
    Accum,
    EVTMulAzp>;

using MulScaleB = cutlass::epilogue::threadblock::VisitorCompute<
    cutlass::multiplies, float, float,
    cutlass::FloatRoundStyle::round_to_nearest
>;

using EVTMulScaleB = cutlass::epilogue::threadblock::Sm80EVT<
    MulScaleB,
    ScaleB,
    EVTSubMulAzp>;

using MulScaleA = cutlass::epilogue::threadblock::VisitorCompute<
    cutlass::multiplies, cutlass::bfloat16_t, float,
    cutlass::FloatRoundStyle::round_to_nearest
>;

using EVTMulScaleA = cutlass::epilogue::threadblock::Sm80EVT<
    MulScaleA,
    ScaleA,
    EVTMulScaleB>;

using D = cutlass::epilogue::threadblock::VisitorAuxStore<
    OutputTileThreadMap, cutlass::bfloat16_t, cutlass::FloatRoundStyle::round_to_nearest,
    cute::Stride<int64_t, cute::Int<1>, cute::Int<0>>
>;

using EVTD = cutlass::epilogue::threadblock::Sm80EVT<
    D,
    EVTMulScaleA>;

using GemmKernel = typename cutlass::gemm::kernel::DefaultGemmWithVisitor<
    ElementA, cutlass::layout::RowMajor, cutlass::ComplexTransform::kNone, kAlignmentAB,
    ElementB, cutlass::layout::ColumnMajor, cutlass::ComplexTransform::kNone, kAlignmentAB,
    ElementPlan, cutlass::layout::RowMajor, kAlignmentPlan,
    ElementAccumulator, ElementCompute,
    cutlass::arch::OpClassTensorOp, cutlass::arch::Sm80,
    BlockTile, WarpTile, Instruction,
    EVTD, Swizzle, kStages,
    cutlass::arch::OpMultiplyAddSaturate, kEpilogueStages>::GemmKernel;
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
  auto const* azp = static_cast<int32_t const*>(call.operand[2]);
  auto const* azp_adj = static_cast<int32_t const*>(call.operand[3]);
  auto* d = static_cast<cutlass::bfloat16_t*>(call.d);
  typename EVTD::Arguments const epilogue = {
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
        {}
      },  // mul_scale_a
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
    /*operands=*/4};

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
  if (int const refused = w8a8::refused(call, 4)) return refused;
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
