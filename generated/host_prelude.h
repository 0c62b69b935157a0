// What the host half of an emitted kernel needs in order to be compiled by a plain C++ compiler and loaded on any
// machine, with or without a GPU: the call interface shared with Python, the few CUDA driver functions used,
// and declarations for names that CUTLASS headers mention in device code.
#pragma once

#include <cuda.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <dlfcn.h>

#include <cstdint>
#include <cstring>
#include <new>
#include <utility>

// Take the tensor-map encoder from below instead of asking the runtime for it at every call.
#define CUTLASS_ENABLE_DIRECT_CUDA_DRIVER_CALL 1

#define W8A8_EXPORT __attribute__((visibility("default")))
#define W8A8_ABI_VERSION 2

// Device built-ins that appear in headers outside of templates. Never called on the host.
extern "C++" {
extern uint3 const threadIdx, blockIdx;
extern dim3 const blockDim, gridDim;
void __syncthreads();
void __syncwarp(unsigned = 0xffffffffu);
template <class T> T __shfl_sync(unsigned, T, int, int = 32);
template <class T> T __shfl_up_sync(unsigned, T, unsigned, int = 32);
template <class T> T __shfl_down_sync(unsigned, T, unsigned, int = 32);
template <class T> T __shfl_xor_sync(unsigned, T, int, int = 32);
int __dp4a(int, int, int);
unsigned __byte_perm(unsigned, unsigned, unsigned);
void __threadfence();
int __syncthreads_and(int);
int __syncthreads_or(int);
}
namespace cutlass::arch {
int LaneId();
int SmId();
}

// What changes from launch to launch: addresses and the stream. Python fills it and Call; the order and sizes of the
// fields are the ABI (cutlass_w8a8/runtime/abi.py).
struct Pointers {
  void* stream;                // CUstream
  void const* a;               // [m, k], leading stride lda
  void const* b;               // [k, n] column-major, leading stride ldb
  void* d;                     // [m, n], leading stride ldd
  void* workspace;             // at least w8a8_workspace() bytes; may be null when that is 0
  void const* operand[8];      // epilogue operands, in the order of the visitor tree
};

// All of a launch. The pointers come first, so that the rest can be kept from one launch to the next.
struct Call : Pointers {
  void* function;              // CUkernel
  int64_t lda, ldb, ldd;       // elements
  int32_t m, n, k;
  int32_t sm_count;            // streaming multiprocessors of the device
  int32_t blocks_per_sm;       // blocks of this kernel that fit one of them
  int32_t splits;              // stream-K kernels: 0 scheduler's choice, 1 no split, >1 that many splits of k
  int32_t swizzle;             // maximum swizzle of the tile order
  int32_t raster;              // 0 heuristic, 1 along m, 2 along n
  int32_t overlap;             // 0 none, 1 dependent launch, 2 that and weights loaded ahead (Hopper's kernels only)
  int32_t wide;                // bit i: operand i is read 16 bytes at a time
  int64_t bytes_a, bytes_b, bytes_d;  // from the first to the last of each matrix
  int64_t bytes_operand[8];    // of each operand
};

// What the launcher needs to know about the kernel before the first call.
struct Info {
  int32_t abi_version;
  int32_t smem_bytes;          // dynamic shared memory
  int32_t threads;             // per block
  int32_t params_bytes;        // size of the kernel parameter
  int32_t operands;            // epilogue operands expected in Call::operand
};

namespace w8a8 {

// Results of w8a8_launch: 0, a positive CUresult, or one of these.
enum : int { kCannotImplement = -1, kNoDriver = -2, kWorkspace = -3, kMisaligned = -4, kOverlapping = -5 };

// Why these pointers cannot be launched with: one is not on a 16-byte boundary, or the result shares memory with what
// it is computed from. 0 if they can.
inline int refused(Call const& call, int operands) {
  auto const address = [](void const* pointer) { return reinterpret_cast<uint64_t>(pointer); };
  uint64_t const d = address(call.d), end = d + call.bytes_d;
  auto const shared = [&](uint64_t from, int64_t bytes) { return from < end && d < from + bytes; };
  uint64_t low = address(call.a) | address(call.b) | d;
  bool overlaps = shared(address(call.a), call.bytes_a) || shared(address(call.b), call.bytes_b);
  for (int i = 0; i < operands; ++i) {
    uint64_t const operand = address(call.operand[i]);
    if (call.wide >> i & 1) low |= operand;
    overlaps |= shared(operand, call.bytes_operand[i]);
  }
  return low % 16 ? kMisaligned : overlaps ? kOverlapping : 0;
}

// The kernel parameter and the grid of recent launches, by what they were made from: in a model that serves, the same
// calls come again at each step. Lives in thread-local storage, which is zero at first; entries are found by the address
// of what Python keeps of a call.
template <class Params>
struct Recent {
  struct Entry {
    Call call;
    uint32_t grid[3];
    alignas(Params) unsigned char params[sizeof(Params)];

    bool holds(Call const& wanted) const {
      // All but the stream, which comes first. No call has a null function, and a Call has no padding.
      return !memcmp(reinterpret_cast<char const*>(&call) + sizeof(void*),
                     reinterpret_cast<char const*>(&wanted) + sizeof(void*), sizeof(Call) - sizeof(void*));
    }

    void set(Call const& made_from, Params const& made, dim3 blocks) {
      call = made_from;
      grid[0] = blocks.x, grid[1] = blocks.y, grid[2] = blocks.z;
      new (params) Params(made);
    }
  };

  Entry entries[64];

  Entry& at(Call const* kept) { return entries[reinterpret_cast<uint64_t>(kept) / 64 % 64]; }
};

inline void* driver_function(char const* name) {
  static void* const library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  return library ? dlsym(library, name) : nullptr;
}

template <class Function> Function* driver(char const* name) { return reinterpret_cast<Function*>(driver_function(name)); }

inline int launch(Call const& call, void* params, dim3 grid, unsigned threads, unsigned smem, dim3 cluster,
                  bool dependent) {
  static auto* const launch_kernel = driver<decltype(::cuLaunchKernelEx)>("cuLaunchKernelEx");
  if (!launch_kernel) return kNoDriver;
  CUlaunchAttribute attributes[2];
  unsigned count = 0;
  if (cluster.x * cluster.y * cluster.z > 1) {
    attributes[count].id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
    attributes[count].value.clusterDim.x = cluster.x;
    attributes[count].value.clusterDim.y = cluster.y;
    attributes[count].value.clusterDim.z = cluster.z;
    ++count;
  }
  if (dependent) {
    attributes[count].id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
    attributes[count].value.programmaticStreamSerializationAllowed = 1;
    ++count;
  }
  CUlaunchConfig config{};
  config.gridDimX = grid.x;
  config.gridDimY = grid.y;
  config.gridDimZ = grid.z;
  config.blockDimX = threads;
  config.blockDimY = 1;
  config.blockDimZ = 1;
  config.sharedMemBytes = smem;
  config.hStream = static_cast<CUstream>(call.stream);
  config.attrs = attributes;
  config.numAttrs = count;
  void* kernel_params[] = {params};
  return launch_kernel(&config, static_cast<CUfunction>(call.function), kernel_params, nullptr);
}

// What the driver said to the last tensor map that it refused, if it has not been asked for since. CUTLASS goes on.
inline thread_local int map_error = 0;

// All that a tensor map is encoded from, apart from the address.
struct MapRequest {
  uint64_t fields[6 + 4 * 5] = {};

  MapRequest() = default;

  template <class Type, class Interleave, class Swizzle, class Promotion, class Fill>
  MapRequest(Type type, cuuint32_t rank, cuuint64_t const* dim, cuuint64_t const* strides, cuuint32_t const* box,
             cuuint32_t const* element_strides, Interleave interleave, Swizzle swizzle, Promotion promotion, Fill fill)
      : fields{1 + rank, uint64_t(type), uint64_t(interleave), uint64_t(swizzle), uint64_t(promotion), uint64_t(fill)} {
    for (cuuint32_t i = 0; i < rank && i < 5; ++i) {
      uint64_t* const mode = fields + 6 + 4 * i;
      mode[0] = dim[i];
      mode[1] = i + 1 < rank ? strides[i] : 0;
      mode[2] = box[i];
      mode[3] = element_strides[i];
    }
  }

  bool operator==(MapRequest const& other) const { return !memcmp(fields, other.fields, sizeof fields); }
};

}  // namespace w8a8

// The driver and runtime functions that CUTLASS's host code refers to, defined here (hidden) on libcuda alone, so that
// no CUDA runtime is linked. Device queries answer with an error: the caller passes those facts in.
extern "C" {

CUresult CUDAAPI cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* address,
                                        cuuint64_t const* dim, cuuint64_t const* strides, cuuint32_t const* box,
                                        cuuint32_t const* element_strides, CUtensorMapInterleave interleave,
                                        CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion,
                                        CUtensorMapFloatOOBfill fill) {
  static auto* const encode = w8a8::driver<decltype(::cuTensorMapEncodeTiled)>("cuTensorMapEncodeTiled");
  static auto* const replace = w8a8::driver<decltype(::cuTensorMapReplaceAddress)>("cuTensorMapReplaceAddress");
  if (!encode || !replace) return CUDA_ERROR_NOT_INITIALIZED;
  // From one launch to the next most often no more than the address differs. Two operands and the result have maps, and
  // the operands a second one for their last rows.
  w8a8::MapRequest const request(type, rank, dim, strides, box, element_strides, interleave, swizzle, promotion, fill);
  static thread_local struct {
    w8a8::MapRequest request;
    CUtensorMap map;
  } recent[5];
  static thread_local unsigned next = 0;
  for (auto& known : recent) {
    if (known.request == request) {
      *map = known.map;
      auto const result = replace(map, address);
      if (result != CUDA_SUCCESS) w8a8::map_error = result;
      return result;
    }
  }
  auto const result =
      encode(map, type, rank, address, dim, strides, box, element_strides, interleave, swizzle, promotion, fill);
  if (result == CUDA_SUCCESS) {
    recent[next++ % 5] = {request, *map};
  } else {
    w8a8::map_error = result;
  }
  return result;
}

cudaError_t CUDARTAPI cudaMemsetAsync(void* address, int value, size_t bytes, cudaStream_t stream) {
  static auto* const memset8 = w8a8::driver<decltype(::cuMemsetD8Async)>("cuMemsetD8Async");
  if (!memset8) return cudaErrorInitializationError;
  auto const result = memset8(reinterpret_cast<CUdeviceptr>(address), static_cast<unsigned char>(value), bytes, stream);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorUnknown;
}

cudaError_t CUDARTAPI cudaGetDevice(int*) { return cudaErrorNotSupported; }
cudaError_t CUDARTAPI cudaDeviceGetAttribute(int*, cudaDeviceAttr, int) { return cudaErrorNotSupported; }
cudaError_t CUDARTAPI cudaGetLastError() { return cudaSuccess; }
char const* CUDARTAPI cudaGetErrorString(cudaError_t) { return "CUDA runtime error"; }
}
