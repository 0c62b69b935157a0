// What the device half of a quantisation kernel needs of CUDA, for a plain C++ compiler: blocks run one after the other,
// the threads of a block as coroutines that switch where they wait for one another.
#pragma once

#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(threads)
#define __shared__ static  // of the one block that runs
#define __CUDA_ARCH__ 800

struct uint4 { unsigned x, y, z, w; };
struct float2 { float x, y; };
struct Index { unsigned x, y, z; };
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline Index threadIdx, blockIdx, blockDim, gridDim;

inline int max(int a, int b) { return a > b ? a : b; }
inline unsigned max(unsigned a, unsigned b) { return a > b ? a : b; }
inline int min(int a, int b) { return a < b ? a : b; }
inline float __uint_as_float(unsigned bits) { float x; std::memcpy(&x, &bits, 4); return x; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fsub_rn(float a, float b) { return a - b; }

inline int clamped(float x, double low, double high) {
  return x != x ? 0 : static_cast<int>(std::fmin(std::fmax(std::nearbyint(static_cast<double>(x)), low), high));
}
inline int __float2int_rn(float x) { return clamped(x, -2147483648.0, 2147483647.0); }
inline int16_t float_to_int16(float x) { return static_cast<int16_t>(clamped(x, -32768, 32767)); }
inline unsigned pack_int8(int high, int low) {
  auto const byte = [](int x) { return static_cast<unsigned>(static_cast<uint8_t>(min(max(x, -128), 127))); };
  return byte(high) << 8 | byte(low);
}
inline unsigned __vmaxu2(unsigned a, unsigned b) {
  return max(a >> 16, b >> 16) << 16 | max(a & 0xffffu, b & 0xffffu);
}
inline unsigned __vmaxs2(unsigned a, unsigned b) {
  auto const half = [](unsigned x) { return static_cast<int>(static_cast<int16_t>(x)); };
  return unsigned(max(half(a >> 16), half(b >> 16))) << 16 | (unsigned(max(half(a), half(b))) & 0xffffu);
}

using __half = _Float16;
inline __half __ushort_as_half(unsigned short bits) { __half x; std::memcpy(&x, &bits, 2); return x; }
inline float __half2float(__half x) { return x; }

enum { __NV_SATFINITE, __NV_E4M3 };
inline unsigned e4m3(float x) {
  if (x != x) return 0x7f;
  unsigned const sign = std::signbit(x) ? 0x80 : 0;
  double const magnitude = std::fabs(static_cast<double>(x));
  if (magnitude >= 448) return sign | 0x7e;
  int exponent = magnitude ? static_cast<int>(std::floor(std::log2(magnitude))) : -9;
  exponent = max(exponent, -6);
  // Steps of an eighth; what is rounded up to the next power of two carries into the exponent.
  int const steps = static_cast<int>(std::nearbyint(std::ldexp(magnitude, 3 - exponent)));
  return sign | unsigned(steps < 8 ? steps : (exponent + 6) * 8 + steps);
}
inline unsigned __nv_cvt_float2_to_fp8x2(float2 x, int, int) { return e4m3(x.y) << 8 | e4m3(x.x); }

namespace emulation {

constexpr unsigned kLanes = 32, kMost = 1024;
constexpr size_t kStack = 64 << 10;

struct Thread {
  ucontext_t context;
  std::unique_ptr<char[]> stack{new char[kStack]};
  Index index;
  int waits;  // how many times it has waited for its warp, and for its block
  int syncs;
  bool done;
};

inline std::vector<Thread> threads;
inline ucontext_t scheduler;
inline Thread* current;
inline unsigned offered[kMost];
inline void (*body)();

inline void yield() { swapcontext(&current->context, &scheduler); }

inline void start() {
  body();
  current->done = true;
  yield();
}

inline unsigned number(Index index) { return index.y * blockDim.x + index.x; }

// Waits until every thread of [first, last) has been here as often as this one.
inline void wait(int Thread::*count, unsigned first, unsigned last) {
  int const mine = ++(current->*count);
  for (unsigned at = first; at < last; ++at) {
    while (threads[at].*count < mine) {
      if (threads[at].done) throw std::logic_error("a thread ended that others wait for");
      yield();
    }
  }
}

inline unsigned exchange(unsigned value, unsigned (*of)(unsigned first, unsigned lane, unsigned how), unsigned how) {
  unsigned const me = number(threadIdx), first = me / kLanes * kLanes;
  offered[me] = value;
  wait(&Thread::waits, first, first + kLanes);
  unsigned const result = of(first, me % kLanes, how);
  wait(&Thread::waits, first, first + kLanes);
  return result;
}

inline void block(Index at) {
  blockIdx = at;
  unsigned const count = blockDim.x * blockDim.y;
  if (threads.size() < count) threads = std::vector<Thread>(kMost);
  for (unsigned i = 0; i < count; ++i) {
    Thread& thread = threads[i];
    thread.index = {i % blockDim.x, i / blockDim.x, 0};
    thread.waits = thread.syncs = 0;
    thread.done = false;
    getcontext(&thread.context);
    thread.context.uc_stack = {thread.stack.get(), 0, kStack};
    thread.context.uc_link = &scheduler;
    makecontext(&thread.context, start, 0);
  }
  for (unsigned left = count; left;) {
    left = 0;
    for (unsigned i = 0; i < count; ++i) {
      current = &threads[i];
      if (current->done) continue;
      threadIdx = current->index;
      swapcontext(&scheduler, &current->context);
      left += !current->done;
    }
  }
}

}  // namespace emulation

inline unsigned __reduce_max_sync(unsigned, unsigned value) {
  auto const largest = [](unsigned first, unsigned, unsigned) {
    unsigned found = 0;
    for (unsigned lane = 0; lane < emulation::kLanes; ++lane) found = max(found, emulation::offered[first + lane]);
    return found;
  };
  return emulation::exchange(value, largest, 0);
}
inline void __syncthreads() { emulation::wait(&emulation::Thread::syncs, 0, blockDim.x * blockDim.y); }
