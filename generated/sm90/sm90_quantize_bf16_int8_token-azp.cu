// sm90_quantize_bf16_int8_token-azp
//
//   low, high = min(0, x[m,:]), max(0, x[m,:])
//   scale[m] = max((high - low) / 255, 2^-126)
//   azp[m] = rint(-128 - low / scale[m])
//   q[m,k] = int8(rint(x[m,k] * (1 / scale[m])) + azp[m])
//
// Emitted by cutlass_w8a8 from this specification:
//   arch        sm90 (arch=compute_90a,code=sm_90a)
//   input       bf16
//   result      int8, and one fp32 scale and int32 zero point a row
//
// Regenerate this text with:
//   cutlass-w8a8 show --arch sm90 --a-dtype int8 --quantize bf16 --scheme token-azp

#include <cstdint>

#if defined(__CUDACC__)
#endif

namespace {

// The kernel parameter. Rows lie ldx and ldq elements apart; those of q do not overlap.
struct Params {
  void const* x;      // [m, k] of bf16
  void* q;            // [m, k] of int8
  float* scale;       // [m]
  int32_t* azp;       // [m]
  int64_t ldx, ldq;
  int32_t m, k;
  int32_t vectors;    // 16-byte vectors that each row of x begins with, all of them aligned; the rest is scalar
  int32_t early;      // let the next kernel of the stream start now, if it was launched to
};

}  // namespace

#if defined(__CUDACC__)

namespace {

using Bits = uint16_t;  // an element of x
constexpr int kPerVector = 16 / sizeof(Bits);
constexpr int kMaxThreads = 1024;
constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffffu;

// What a vector of 16 bytes of x becomes.
struct alignas(kPerVector) Packed {
  unsigned word[kPerVector / 4];
};

// Extremes are compared as integers, whose order is that of the values they are the bits of: above zero read with a
// sign, which puts what is below zero below; below zero read without one, which puts the lowest on top. NaNs lie beyond
// infinity, so that one NaN makes its row's extreme a NaN, which a maximum of floats would drop.
struct Extremes {
  unsigned high, low;  // of the values and zero
};

constexpr unsigned kSign = 0x8000u;  // the least magnitude below zero

__device__ __forceinline__ Extremes nothing() { return {0u, kSign}; }

using ::max;  // the next line would hide it

__device__ __forceinline__ Extremes max(Extremes a, Extremes b) { return {max(a.high, b.high), max(a.low, b.low)}; }

__device__ __forceinline__ Extremes magnitude(uint4 v) {
  unsigned const high = __vmaxs2(__vmaxs2(v.x, v.y), __vmaxs2(v.z, v.w));
  unsigned const low = __vmaxu2(__vmaxu2(v.x, v.y), __vmaxu2(v.z, v.w));
  int const first = static_cast<int16_t>(high & 0xffffu), second = static_cast<int16_t>(high >> 16);
  return {unsigned(max(max(first, second), 0)), max(max(low & 0xffffu, low >> 16), kSign)};
}

__device__ __forceinline__ Extremes magnitude(Bits x) { return x < kSign ? Extremes{x, kSign} : Extremes{0u, x}; }

__device__ __forceinline__ float value(unsigned bits) {
  return __uint_as_float(bits << 16);
}

// Two elements of x times `inverse`, rounded to the result's type, as its low and high byte.
__device__ __forceinline__ unsigned convert(float low, float high, float inverse, int azp) {
  // NaN converts to 0. The others are at most 255; two roundings can make a sum of 128, which saturates.
  unsigned packed;
  asm("cvt.pack.sat.s8.s32.b32 %0, %1, %2, %3;"
      : "=r"(packed)
      : "r"(__float2int_rn(__fmul_rn(high, inverse)) + azp), "r"(__float2int_rn(__fmul_rn(low, inverse)) + azp), "r"(0));
  return packed;
}

__device__ __forceinline__ Packed convert(uint4 v, float inverse, int azp) {
  Packed packed;
  unsigned const word[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    unsigned const first = word[2 * i], second = word[2 * i + 1];
    packed.word[i] = convert(value(first & 0xffffu), value(first >> 16), inverse, azp) |
                     convert(value(second & 0xffffu), value(second >> 16), inverse, azp) << 16;
  }
  return packed;
}

__device__ __forceinline__ unsigned warp_max(unsigned value) {
#if __CUDA_ARCH__ >= 800
  return __reduce_max_sync(kAllLanes, value);
#else
#pragma unroll
  for (int lanes = kWarp / 2; lanes > 0; lanes /= 2) value = max(value, __shfl_xor_sync(kAllLanes, value, lanes));
  return value;
#endif
}

__device__ __forceinline__ Extremes warp_max(Extremes value) { return {warp_max(value.high), warp_max(value.low)}; }

// The largest of a row's magnitudes, in every thread of the row. All threads of the block call it once.
__device__ __forceinline__ Extremes row_max(Extremes value) {
  value = warp_max(value);
  if (blockDim.x == kWarp) return value;
  __shared__ Extremes partial[kMaxThreads / kWarp];
  unsigned const warps = blockDim.x / kWarp, first = threadIdx.y * warps, lane = threadIdx.x % kWarp;
  if (lane == 0) partial[first + threadIdx.x / kWarp] = value;
  __syncthreads();
  return warp_max(lane < warps ? partial[first + lane] : nothing());
}

// The scale of what lies between these extremes. Every operation is IEEE's, so that every device and the CPU agree. Of
// half the range, because the whole one can exceed a float.
__device__ __forceinline__ float row_scale(Extremes seen) {
  float const half = __fsub_rn(__fmul_rn(value(seen.high), 0.5f), __fmul_rn(value(seen.low), 0.5f));
  if (half != half) return __uint_as_float(0x7fc00000u);
  return fmaxf(__fdiv_rn(half, 0x1.fe00000000000p+6f), 0x1.0000000000000p-126f);
}

// The code of 0, from -128 to 127; 0 where the scale is a NaN.
__device__ __forceinline__ int row_azp(Extremes seen, float scale) {
  return __float2int_rn(__fsub_rn(-128.f, __fdiv_rn(value(seen.low), scale)));
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
  int64_t row;
  bool live;
  Bits const* x;
  uint8_t* q;

  __device__ explicit Place(Params const& params)
      : row(int64_t(blockIdx.x) * blockDim.y + threadIdx.y),
        live(row < params.m),
        x(static_cast<Bits const*>(params.x) + row * params.ldx),
        q(static_cast<uint8_t*>(params.q) + row * params.ldq) {}
};

// A row that is all vectors, and at most kVectors of them a thread: read once, kept in registers.
template <int kVectors>
__device__ __forceinline__ void quantize_held(Params const& params) {
  Place const place(params);
  int const vectors = place.live ? params.vectors : 0;
  auto const* x = reinterpret_cast<uint4 const*>(place.x);
  auto* q = reinterpret_cast<Packed*>(place.q);
  begin(params);
  uint4 held[kVectors];
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    int const at = threadIdx.x + i * blockDim.x;
    held[i] = at < vectors ? x[at] : make_uint4(0, 0, 0, 0);
  }
  Extremes largest = nothing();
#pragma unroll
  for (int i = 0; i < kVectors; ++i) largest = max(largest, magnitude(held[i]));
  largest = row_max(largest);
  float const scale = row_scale(largest);
  float const inverse = __fdiv_rn(1.f, scale);
  int const azp = row_azp(largest, scale);
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    int const at = threadIdx.x + i * blockDim.x;
    if (at < vectors) q[at] = convert(held[i], inverse, azp);
  }
  if (place.live && threadIdx.x == 0) {
    params.scale[place.row] = scale;
    params.azp[place.row] = azp;
  }
}

}  // namespace

// Any row: its vectors, then what is left, element by element; and all of it a second time, out of a cache.
extern "C" __global__ void __launch_bounds__(kMaxThreads) w8a8_kernel(__grid_constant__ Params const params) {
  Place const place(params);
  int const vectors = place.live ? params.vectors : 0;
  int const end = place.live ? params.k : 0;
  int const tail = vectors * kPerVector + threadIdx.x;
  auto const* x = reinterpret_cast<uint4 const*>(place.x);
  begin(params);
  Extremes largest = nothing();
  for (int at = threadIdx.x; at < vectors; at += blockDim.x) largest = max(largest, magnitude(x[at]));
  for (int at = tail; at < end; at += blockDim.x) largest = max(largest, magnitude(place.x[at]));
  largest = row_max(largest);
  float const scale = row_scale(largest);
  float const inverse = __fdiv_rn(1.f, scale);
  int const azp = row_azp(largest, scale);
  auto* q = reinterpret_cast<Packed*>(place.q);
  for (int at = threadIdx.x; at < vectors; at += blockDim.x) q[at] = convert(x[at], inverse, azp);
  for (int at = tail; at < end; at += blockDim.x) {
    place.q[at] = static_cast<uint8_t>(convert(value(place.x[at]), 0.f, inverse, azp));
  }
  if (place.live && threadIdx.x == 0) {
    params.scale[place.row] = scale;
    params.azp[place.row] = azp;
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
