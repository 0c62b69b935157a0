// sm90_quantize_fp16_e4m3_static
//
//   q[m,k] = e4m3(x[m,k] * (1 / scale))
//
// Emitted by cutlass_w8a8 from this specification:
//   arch        sm90 (arch=compute_90a,code=sm_90a)
//   input       fp16
//   result      e4m3, by the fp32 scale given
//
// Regenerate this text with:
//   cutlass-w8a8 show --arch sm90 --a-dtype e4m3 --quantize fp16 --scheme static

#include <cstdint>

#if defined(__CUDACC__)
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#endif

namespace {

// The kernel parameter. Rows lie ldx and ldq elements apart; those of q do not overlap.
// A tensor without gaps is cut into rows anew, as suits the launch, and its last row may be shorter.
struct Params {
  void const* x;      // [m, k] of fp16
  void* q;            // [m, k] of e4m3
  float const* scale; // [1]
  int64_t ldx, ldq;
  int32_t m, k;
  int32_t vectors;    // 16-byte vectors that each row of x begins with, all of them aligned; the rest is scalar
  int32_t early;      // let the next kernel of the stream start now, if it was launched to
  int32_t last;       // elements of the last row
  int32_t unused;
};

}  // namespace

#if defined(__CUDACC__)

namespace {

using Bits = uint16_t;  // an element of x
constexpr int kPerVector = 16 / sizeof(Bits);
constexpr int kMaxThreads = 1024;

// What a vector of 16 bytes of x becomes.
struct alignas(kPerVector) Packed {
  unsigned word[kPerVector / 4];
};

__device__ __forceinline__ float value(unsigned bits) {
  return __half2float(__ushort_as_half(static_cast<unsigned short>(bits)));
}

// Two elements of x times `inverse`, rounded to the result's type, as its low and high byte.
__device__ __forceinline__ unsigned convert(float low, float high, float inverse) {
  float2 const scaled = make_float2(__fmul_rn(low, inverse), __fmul_rn(high, inverse));
  return __nv_cvt_float2_to_fp8x2(scaled, __NV_SATFINITE, __NV_E4M3);
}

__device__ __forceinline__ Packed convert(uint4 v, float inverse) {
  Packed packed;
  unsigned const word[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    unsigned const first = word[2 * i], second = word[2 * i + 1];
    packed.word[i] = convert(value(first & 0xffffu), value(first >> 16), inverse) |
                     convert(value(second & 0xffffu), value(second >> 16), inverse) << 16;
  }
  return packed;
}

// The kernel before this one may still be running until wait() returns: nothing global is touched earlier. It costs
// the next kernel nothing to be let in at once, for that one waits too, until this grid has ended.
__device__ __forceinline__ void begin(Params const& params) {
#if __CUDA_ARCH__ >= 900
  if (params.early) asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Where a thread is: blockDim.x threads share a row, blockDim.y rows share a block.
struct Place {
  bool live;
  int count;    // elements of the row
  int vectors;  // that it begins with
  Bits const* x;
  uint8_t* q;

  __device__ Place(Params const& params, int64_t row)
      : live(row >= 0 && row < params.m),
        count(!live ? 0 : row == params.m - 1 ? params.last : params.k),
        vectors(min(params.vectors, count / kPerVector)),
        x(static_cast<Bits const*>(params.x) + row * params.ldx),
        q(static_cast<uint8_t*>(params.q) + row * params.ldq) {}

  __device__ explicit Place(Params const& params) : Place(params, int64_t(blockIdx.x) * blockDim.y + threadIdx.y) {}
};

// A row that is vectors, at most kVectors of them a thread, and at most one element a thread beyond them: read once, kept
// in registers.
template <int kVectors>
__device__ __forceinline__ void quantize_held(Params const& params) {
  Place const place(params);
  int const vectors = place.vectors;
  auto const* x = reinterpret_cast<uint4 const*>(place.x);
  auto* q = reinterpret_cast<Packed*>(place.q);
  int const tail = vectors * kPerVector + threadIdx.x;
  begin(params);
  uint4 held[kVectors];
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    int const at = threadIdx.x + i * blockDim.x;
    held[i] = at < vectors ? x[at] : make_uint4(0, 0, 0, 0);
  }
  Bits const rest = tail < place.count ? place.x[tail] : Bits(0);
  float const scale = *params.scale;
  float const inverse = __fdiv_rn(1.f, scale);
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    int const at = threadIdx.x + i * blockDim.x;
    if (at < vectors) q[at] = convert(held[i], inverse);
  }
  if (tail < place.count) place.q[tail] = static_cast<uint8_t>(convert(value(rest), 0.f, inverse));
}

}  // namespace

// Any row: its vectors, then what is left, element by element.
extern "C" __global__ void __launch_bounds__(kMaxThreads) w8a8_kernel(__grid_constant__ Params const params) {
  Place const place(params);
  int const vectors = place.vectors;
  int const end = place.count;
  int const tail = vectors * kPerVector + threadIdx.x;
  auto const* x = reinterpret_cast<uint4 const*>(place.x);
  begin(params);
  float const scale = *params.scale;
  float const inverse = __fdiv_rn(1.f, scale);
  auto* q = reinterpret_cast<Packed*>(place.q);
  for (int at = threadIdx.x; at < vectors; at += blockDim.x) q[at] = convert(x[at], inverse);
  for (int at = tail; at < end; at += blockDim.x) {
    place.q[at] = static_cast<uint8_t>(convert(value(place.x[at]), 0.f, inverse));
  }
}

extern "C" __global__ void __launch_bounds__(kMaxThreads) w8a8_held_1(__grid_constant__ Params const params) {
  quantize_held<1>(params);
}

extern "C" __global__ void __launch_bounds__(kMaxThreads) w8a8_held_2(__grid_constant__ Params const params) {
  quantize_held<2>(params);
}

extern "C" __global__ void __launch_bounds__(kMaxThreads) w8a8_held_4(__grid_constant__ Params const params) {
  quantize_held<4>(params);
}

extern "C" __global__ void __launch_bounds__(kMaxThreads) w8a8_held_8(__grid_constant__ Params const params) {
  quantize_held<8>(params);
}

#else  // the host half, for a plain C++ compiler; host_prelude.h declares Info and the driver's functions

namespace {

// One launch. Python fills it; the order and sizes of the fields are the ABI (cutlass_w8a8/runtime/abi.py).
struct QuantCall {
  void* function;       // CUkernel
  void* stream;         // CUstream
  Params params;
  int32_t threads;      // of a row
  int32_t rows;         // of a block
  int32_t programmatic; // start while the kernel before is running
  int32_t unused;
};

}  // namespace

extern "C" W8A8_EXPORT Info const w8a8_info = {
    W8A8_ABI_VERSION, /*smem_bytes=*/0, /*threads=*/1024, static_cast<int32_t>(sizeof(Params)), /*operands=*/0};

extern "C" W8A8_EXPORT int64_t w8a8_workspace(QuantCall const*) { return 0; }

extern "C" W8A8_EXPORT int w8a8_launch(QuantCall const* call) {
  static auto* const launch_kernel = w8a8::driver<decltype(::cuLaunchKernelEx)>("cuLaunchKernelEx");
  if (!launch_kernel) return w8a8::kNoDriver;
  Params params = call->params;
  CUlaunchAttribute attribute{};
  attribute.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
  attribute.value.programmaticStreamSerializationAllowed = 1;
  CUlaunchConfig config{};
  config.gridDimX = static_cast<unsigned>((int64_t(params.m) + call->rows - 1) / call->rows);
  config.gridDimY = 1;
  config.gridDimZ = 1;
  config.blockDimX = static_cast<unsigned>(call->threads);
  config.blockDimY = static_cast<unsigned>(call->rows);
  config.blockDimZ = 1;
  config.hStream = static_cast<CUstream>(call->stream);
  config.attrs = &attribute;
  config.numAttrs = call->programmatic ? 1 : 0;
  void* kernel_params[] = {&params};
  return launch_kernel(&config, static_cast<CUfunction>(call->function), kernel_params, nullptr);
}

#endif
