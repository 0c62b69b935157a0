// sm90_quantize_bf16_e4m3_tensor
//
//   scale = max(max|x| / 448, 1 / (448 * 512)); q[m,k] = e4m3(x[m,k] * (1 / scale))
//
// Emitted by cutlass_w8a8 from this specification:
//   arch        sm90 (arch=compute_90a,code=sm_90a)
//   input       bf16
//   result      e4m3, and one fp32 scale for all
//
// Regenerate this text with:
//   cutlass-w8a8 show --arch sm90 --a-dtype e4m3 --quantize bf16 --scheme tensor

#include <cstdint>

#if defined(__CUDACC__)
#include <cuda_fp8.h>
#endif

namespace {

// The kernel parameter. Rows lie ldx and ldq elements apart; those of q do not overlap.
// A tensor without gaps is cut into rows anew, as suits the launch, and its last row may be shorter.
struct Params {
  void const* x;      // [m, k] of bf16
  void* q;            // [m, k] of e4m3
  float* scale;       // [1]
  void* partial;      // [partials] of unsigned, what w8a8_scan has seen; together they are all of x
  int64_t ldx, ldq;
  int32_t m, k;
  int32_t vectors;    // 16-byte vectors that each row of x begins with, all of them aligned; the rest is scalar
  int32_t early;      // let the next kernel of the stream start now, if it was launched to
  int32_t last;       // elements of the last row
  int32_t partials;   // 0 if x is one row, and all that there is to see
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

// Magnitudes are compared as integers: without its sign a float's bits grow with its value, and every NaN lies above
// infinity, so that one NaN makes its row's maximum a NaN, which a maximum of floats would drop.
__device__ __forceinline__ unsigned magnitude(uint4 v) {
  constexpr unsigned kAbs = 0x7fff7fffu;
  unsigned const pair = __vmaxu2(__vmaxu2(v.x & kAbs, v.y & kAbs), __vmaxu2(v.z & kAbs, v.w & kAbs));
  return max(pair & 0xffffu, pair >> 16);
}

__device__ __forceinline__ unsigned magnitude(Bits x) { return x & 0x7fffu; }

__device__ __forceinline__ float value(unsigned bits) {
  return __uint_as_float(bits << 16);
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

__device__ __forceinline__ unsigned warp_max(unsigned value) {
#if __CUDA_ARCH__ >= 800
  return __reduce_max_sync(kAllLanes, value);
#else
#pragma unroll
  for (int lanes = kWarp / 2; lanes > 0; lanes /= 2) value = max(value, __shfl_xor_sync(kAllLanes, value, lanes));
  return value;
#endif
}

// The largest of a row's magnitudes, in every thread of the row. All threads of the block call it once.
__device__ __forceinline__ unsigned row_max(unsigned value) {
  value = warp_max(value);
  if (blockDim.x == kWarp) return value;
  __shared__ unsigned partial[kMaxThreads / kWarp];
  unsigned const warps = blockDim.x / kWarp, first = threadIdx.y * warps, lane = threadIdx.x % kWarp;
  if (lane == 0) partial[first + threadIdx.x / kWarp] = value;
  __syncthreads();
  return warp_max(lane < warps ? partial[first + lane] : 0u);
}

// The row's scale from its largest magnitude. Division and product are IEEE's, so that every device and the CPU agree.
__device__ __forceinline__ float row_scale(unsigned magnitude) {
  float const largest = value(magnitude);
  if (largest != largest) return __uint_as_float(0x7fc00000u);
  return fmaxf(__fdiv_rn(largest, 0x1.c000000000000p+8f), 0x1.24924a0000000p-18f);
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

  // From the last row on: w8a8_scan has read it last, so that it may still be in L2.
  __device__ explicit Place(Params const& params)
      : Place(params, params.m - 1 - (int64_t(blockIdx.x) * blockDim.y + threadIdx.y)) {}
};

// What w8a8_scan has seen of x, as far as this thread looks; row_max() puts it together.
__device__ __forceinline__ unsigned scanned(Params const& params) {
  auto const* partial = static_cast<unsigned const*>(params.partial);
  unsigned largest = 0;
  for (int at = threadIdx.x; at < params.partials; at += blockDim.x) largest = max(largest, partial[at]);
  return largest;
}

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
  unsigned largest = max(scanned(params), magnitude(rest));
#pragma unroll
  for (int i = 0; i < kVectors; ++i) largest = max(largest, magnitude(held[i]));
  float const scale = row_scale(row_max(largest));
  float const inverse = __fdiv_rn(1.f, scale);
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    int const at = threadIdx.x + i * blockDim.x;
    if (at < vectors) q[at] = convert(held[i], inverse);
  }
  if (tail < place.count) place.q[tail] = static_cast<uint8_t>(convert(value(rest), 0.f, inverse));
  if (blockIdx.x == 0 && threadIdx.y == 0 && threadIdx.x == 0) {
    *params.scale = scale;
  }
}

}  // namespace

// Any row: its vectors, then what is left, element by element; and all of it a second time, out of a cache.
extern "C" __global__ void __launch_bounds__(kMaxThreads) w8a8_kernel(__grid_constant__ Params const params) {
  Place const place(params);
  int const vectors = place.vectors;
  int const end = place.count;
  int const tail = vectors * kPerVector + threadIdx.x;
  auto const* x = reinterpret_cast<uint4 const*>(place.x);
  begin(params);
  unsigned largest = scanned(params);
  if (!params.partials) {
    for (int at = threadIdx.x; at < vectors; at += blockDim.x) largest = max(largest, magnitude(x[at]));
    for (int at = tail; at < end; at += blockDim.x) largest = max(largest, magnitude(place.x[at]));
  }
  float const scale = row_scale(row_max(largest));
  float const inverse = __fdiv_rn(1.f, scale);
  auto* q = reinterpret_cast<Packed*>(place.q);
  for (int at = threadIdx.x; at < vectors; at += blockDim.x) q[at] = convert(x[at], inverse);
  for (int at = tail; at < end; at += blockDim.x) {
    place.q[at] = static_cast<uint8_t>(convert(value(place.x[at]), 0.f, inverse));
  }
  if (blockIdx.x == 0 && threadIdx.y == 0 && threadIdx.x == 0) {
    *params.scale = scale;
  }
}

// What is seen of a tensor: each row of threads goes through rows of x in turn, and leaves one value. Nothing has to be
// reset before or after: every value is written before any is read.
extern "C" __global__ void __launch_bounds__(kMaxThreads) w8a8_scan(__grid_constant__ Params const params) {
  constexpr int kAtOnce = 4;
  int64_t const mine = int64_t(blockIdx.x) * blockDim.y + threadIdx.y;
  begin(params);
  unsigned largest = 0;
  for (int64_t row = mine; row < params.m; row += int64_t(gridDim.x) * blockDim.y) {
    Place const place(params, row);
    auto const* x = reinterpret_cast<uint4 const*>(place.x);
    for (int first = threadIdx.x; first < place.vectors; first += kAtOnce * blockDim.x) {
      uint4 held[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        int const at = first + i * blockDim.x;
        held[i] = at < place.vectors ? x[at] : make_uint4(0, 0, 0, 0);
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) largest = max(largest, magnitude(held[i]));
    }
    for (int at = place.vectors * kPerVector + threadIdx.x; at < place.count; at += blockDim.x) {
      largest = max(largest, magnitude(place.x[at]));
    }
  }
  largest = row_max(largest);
  if (threadIdx.x == 0) static_cast<unsigned*>(params.partial)[mine] = largest;
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
  int32_t blocks;       // of the grid; 0: as many as there are rows for
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
  int64_t const blocks = call->blocks ? call->blocks : (int64_t(params.m) + call->rows - 1) / call->rows;
  config.gridDimX = static_cast<unsigned>(blocks);
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
