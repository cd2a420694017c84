"""``ModelNew``: linear, sigmoid, linear, logsumexp at float32 accuracy and tensor-core speed, in place of ``Model``.

    z = x @ W1.T + b1            x  (batch, input)    W1 (hidden, input)   b1 (hidden)
    h = sigmoid(z)               h  (batch, hidden)
    y = h @ W2.T + b2            W2 (output, hidden)  b2 (output)
    out[i] = log(sum_j exp(y[i, j]))                  out (batch)

The file reads from the inside out: the CUDA kernels (operands, epilogues, gradients), the operators that string them
together with cuBLAS, the build that turns both into a library on first use, and the module that calls it. It stands
alone: it imports nothing of its own project, and may be executed as text.
"""

import contextlib
import functools
import glob
import hashlib
import importlib.util
import itertools
import os
import platform
import re
import shutil
import stat
import subprocess
import sys
import tempfile
import time

import torch
from torch import nn
from torch.utils._device import DeviceContext

EXTENSION = "gemm_sigmoid_logsumexp"

# What both sources see.
DECLARATIONS = r"""
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <cstdint>

constexpr int kStrip = 16;  // rows of which a thread of the gradients takes the sum, or the largest, by column

// Rows of float32, each contiguous; `padded` is `cols` made a multiple of 8.
struct Rows {
  const float* data;
  int64_t count, stride;
  int cols, padded;
};

// What rows are split into: (count, parts * padded) float16 and, for each row, what its products are to be multiplied
// by, and its doubt.
struct Operand {
  __half* data;
  float *scale, *doubt;
};

// A weight and its bias, and what `split` makes of them; padded sizes are multiples of 8. Pad columns hold
// zeros, pad rows repeat the first.
struct Weight {
  const float* matrix;  // (rows, cols), contiguous
  const float* bias;    // (rows); null in the plain form where y has it already
  int rows, cols, padded_rows, padded_cols;
  Operand operand;                 // of padded_rows
  float* padded_bias;              // (padded_rows)
  float *half_sum, *centred_bias;  // (padded_rows): half a row's sum, due where h is less 1/2 (W1: 0); bias + half_sum
  // Of all rows: the largest doubt; W1's scale; W2's ratio of a row's largest to its mean magnitude.
  float *largest_doubt, *largest_scale, *largest_ratio;
};

// The first product of a slice: z without its bias in raw accumulators / `unit` or, where repaired, z itself.
// `bias_sigmoid` puts in its place h's operand, if it is `half`, or h, where that is to be kept.
struct Hidden {
  void* product;  // (batch, weight.padded_rows), float16 if `half`, else float32
  bool half;
  float unit, correction;  // `correction`: for what the tensor cores truncate
  Rows x;
  Operand operand;  // of x
  bool* repaired;   // (batch)
  float* slope;     // (batch), where h is to be kept, else null: a power of two above every h (1 - h) of the row, or 0
  Weight weight;    // W1
};

// What each row of the batch weighs in the gradients.
struct RowFactors {
  const float *grad, *slope;
};

// What `unscale` multiplies by: a number for all, two for each row, one for each column; null where there is none.
struct Scales {
  const float *all, *row, *row2, *column;
};

constexpr float kUpP = 0x1p14f;  // what the softmax is multiplied by in the gradients' operands
// lo is stored times this. To make up for it the hi that it meets is stored over this or, where hi is stored only as it
// is, the product is multiplied by 1 over this (`gemm_over_batch`).
constexpr float kShift = 64.f;

// The segments of grad h and grad slope x, which enter only products over the batch. Those are made part by part, so
// that hi need be stored only once: [64 lo | hi], or hi alone.
__host__ __device__ constexpr int batch_segments(int parts) { return parts == 3 ? 2 : 1; }

cudaError_t split(int parts, Weight w1, Weight w2, Rows rows, Operand operand, cudaStream_t stream);
cudaError_t bias_sigmoid(int parts, Hidden hidden, const float* next_largest_ratio, Operand operand, bool* centred,
                         cudaStream_t stream);
cudaError_t bias_logsumexp(int parts, int64_t batch, float* product, int64_t stride, float row_scale, float* logits,
                           Hidden hidden, const float* doubt, const bool* centred, Weight weight, float* out,
                           cudaStream_t stream);
cudaError_t plain_bias_sigmoid(Rows z, const float* bias, float* h, float* slope, cudaStream_t stream);
cudaError_t gradient_bounds(RowFactors factors, Rows x, float* bounds, cudaStream_t stream);
cudaError_t reduce_columns(bool to_largest, const float* from, int64_t count, int64_t stride, int64_t size, int shares,
                           float* to, cudaStream_t stream);
cudaError_t bounds_to_scales(float* bounds, int count, cudaStream_t stream);
cudaError_t softmax_gradient(int parts, const float* grad, const float* y, const float* out, int64_t batch, int cols,
                             int padded, __half* operand, float* plain, float* sums, cudaStream_t stream);
cudaError_t sigmoid_gradient(int parts, float* dh, const float* h, RowFactors factors, int64_t batch, int padded,
                             float correction, const float* w2_scale, const float* grad_scale, __half* operand,
                             __half* h_operand, float* sums, cudaStream_t stream);
cudaError_t weigh_rows(int parts, RowFactors factors, Rows x, const float* x_scale, __half* operand,
                       cudaStream_t stream);
cudaError_t unscale(const float* from, int64_t rows, int cols, int padded, float factor, Scales scales, float* to,
                    cudaStream_t stream);
"""

# The kernels and their launchers, for nvcc.
CUDA_SOURCE = (
    DECLARATIONS
    + r"""
#include <cfloat>
#include <utility>

// ---- Operands --------------------------------------------------------------------------------------------
//
// A float32 number a, scaled by a power of two so that its row's largest magnitude lies in [2^14, 2^15), is split into
// hi = fp16(a) and lo = fp16(a - hi): 22 bits. Then a*b = lo*hi + hi*lo + hi*hi, short of lo*lo, which is beyond the
// last bit. The three products are one GEMM whose K is three times as long:
//
//     operand of x and h   [ 64 lo | hi/64 | hi ]
//     operand of W1 and W2 [ hi/64 | 64 lo | hi ]
//
// The small products come first, because tensor cores truncate as they accumulate, and truncate less while the sum is
// small. The factor 64 is moved from hi to lo so that both stay clear of float16's subnormals down to 2^-23 of the
// row's maximum. Smaller elements ("tiny" ones) are off by up to 2^-30 (where the maximum is below 2^15), times the
// other operand's at most 2^15: a row's `doubt` is the sum of these bounds over float32's relative error 2^-24. Where a
// product does not exceed the doubts of its row and column, the epilogue computes it anew in float32 (`repair_row`).
// Rows that hold an infinity, or whose magnitude is beyond 2^+-60, have an infinite doubt.
//
// With one part ("tf32") an operand is hi alone: 11 bits, as TF32 has. There the scale maps the row's largest magnitude
// to 2^14 itself, which float16 holds exactly: rows that a few large elements dominate gain a bit by it. In inference
// the first product is float16 too.

constexpr int kExponent = 15;  // scaled magnitudes stay below 2^15: float16 holds them, float32 their products' sums
constexpr int kExponentRange = 60;  // beyond, the scales themselves could over- or underflow
constexpr int kThreads = 128;
constexpr int kLargestBlock = 1024;
constexpr int kEnoughThreads = 1 << 17;  // that fill an H200: half of what it can hold, were registers no limit
constexpr int kGroup = 4;                // elements a thread handles at once: 16 bytes of float32
constexpr int kSweep = 4;                // groups a thread of bias_logsumexp reads before it waits for the first

// A row of a warp's threads or fewer shares a block of kThreads with others; a row of more has a block to itself.
__host__ __device__ constexpr int rows_per_block(int row_threads) {
  return row_threads <= 32 ? kThreads / row_threads : 1;
}

// Blocks of bias_sigmoid that a multiprocessor is to hold: as many as an H200's registers allow, of which a thread
// wants fewer where rows are short.
constexpr int sigmoid_blocks(int product_bytes, int row_threads, int count) {
  const int of_kthreads = row_threads == 32 && count <= 2 ? 12 : product_bytes == 4 ? 7 : 8;
  return of_kthreads * kThreads / (rows_per_block(row_threads) * row_threads);
}

template <int kParts>
struct Precision {
  static constexpr float kTiny = kParts == 3 ? 0x1p-8f : 0x1p-14f;       // below it, in scaled units, bits are lost
  static constexpr float kDoubtPerTiny = kParts == 3 ? 0x1p9f : 0x1p1f;  // 2^-30 2^15 2^24; 2^-25 2^15 2^11
};

struct Max {  // of a NaN and a number: the NaN
  __device__ float operator()(float a, float b) const { return a > b || isnan(a) ? a : b; }
};
struct Sum {
  template <typename T>
  __device__ T operator()(T a, T b) const {
    return a + b;
  }
};

// `value` of the lane whose number is this one's xor `offset`; structs have overloads.
template <typename T>
__device__ T from_neighbour(T value, int offset) {
  return __shfl_xor_sync(~0u, value, offset);
}

// The reduction of one value a thread over groups of `threads` neighbours (a power of two; 32 or more: over the warp),
// returned to each. All of a warp must come.
template <typename T, typename Op>
__device__ T warp_reduce(T value, Op op, int threads = 32) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2)
    if (offset < threads) value = op(value, from_neighbour(value, offset));
  return value;
}

// The same over the threads of one threadIdx.y: at most a warp's, or a whole block's, whose blockDim.y is 1.
template <typename T, typename Op>
__device__ T row_reduce(T value, Op op) {
  __shared__ T partial[32];
  value = warp_reduce(value, op, blockDim.x);
  if (blockDim.x <= 32) return value;
  __syncthreads();  // an earlier reduction may still be reading
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = value;
  __syncthreads();
  value = partial[0];
  for (int warp = 1; warp < blockDim.x / 32; ++warp) value = op(value, partial[warp]);
  return value;
}

// Every kernel waits here for the one before it in the stream, which `launch` lets it overtake in being set up.
__device__ void wait_for_stream() {
#if __CUDA_ARCH__ >= 900
  cudaGridDependencySynchronize();
#endif
}

// Whether any thread of a row's block says so, or of its warp where a row has no more; and a barrier for them.
__device__ bool any_of_row(bool value) { return blockDim.x <= 32 ? __any_sync(~0u, value) : __syncthreads_or(value); }
__device__ void sync_row() {
  if (blockDim.x <= 32) __syncwarp();
  else __syncthreads();
}

// Whether rows of this start and stride can be read 16 bytes at a time.
__device__ bool aligned(const float* matrix, int64_t stride) {
  return reinterpret_cast<uintptr_t>(matrix) % 16 == 0 && stride % kGroup == 0;
}

__device__ void load_vector(float (&v)[kGroup], const float* from) {
  const float4 loaded = *reinterpret_cast<const float4*>(from);
  v[0] = loaded.x, v[1] = loaded.y, v[2] = loaded.z, v[3] = loaded.w;
}

__device__ void load_vector(float (&v)[kGroup], const __half* from) {
  const uint2 loaded = *reinterpret_cast<const uint2*>(from);
  const float2 first = __half22float2(reinterpret_cast<const __half2&>(loaded.x));
  const float2 second = __half22float2(reinterpret_cast<const __half2&>(loaded.y));
  v[0] = first.x, v[1] = first.y, v[2] = second.x, v[3] = second.y;
}

__device__ void store_vector(float* to, const float (&v)[kGroup]) {
  *reinterpret_cast<float4*>(to) = make_float4(v[0], v[1], v[2], v[3]);
}

// Four neighbours of a row of `cols` elements, zeros beyond its end.
__device__ void load_group(float (&v)[kGroup], const float* row, int start, int cols, bool is_aligned) {
  if (is_aligned && start + kGroup <= cols) {
    load_vector(v, row + start);
  } else {
#pragma unroll
    for (int i = 0; i < kGroup; ++i) v[i] = start + i < cols ? row[start + i] : 0.f;
  }
}

// Blocks side by side in which every group of a row has its thread.
__host__ __device__ int blocks_across(int padded, int threads) {
  return (padded + threads * kGroup - 1) / (threads * kGroup);
}

// Where a thread's group g of a chunk starts, the row being of `threads` threads; a warp's are neighbours.
__device__ int group_start(int chunk, int g, int threads) {
  return chunk + (g * threads + static_cast<int>(threadIdx.x)) * kGroup;
}

// Written as assembly because the compiler makes two stores of one of them.
__device__ void store_halves(__half* to, const __half2 (&v)[kGroup / 2]) {
  asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(to), "r"(reinterpret_cast<const unsigned&>(v[0])),
               "r"(reinterpret_cast<const unsigned&>(v[1]))
               : "memory");
}

// Writes a group of scaled values into the segments of an operand's row, `padded` elements apart. Three: [64 lo | hi/64
// | hi] or, of a weight, [hi/64 | 64 lo | hi]; two, never of a weight: [64 lo | hi]; one: hi.
template <int kSegments, bool kWeight>
__device__ void store_group(__half* row, int start, int padded, const float (&v)[kGroup]) {
  __half2 hi[2], low[2], high_shifted[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    hi[i] = __floats2half2_rn(v[2 * i], v[2 * i + 1]);
    const float2 high = __half22float2(hi[i]);
    low[i] = __floats2half2_rn((v[2 * i] - high.x) * kShift, (v[2 * i + 1] - high.y) * kShift);
    high_shifted[i] = __hmul2(hi[i], __float2half2_rn(1 / kShift));
  }
  if (kSegments > 1) store_halves(row + start, kWeight ? high_shifted : low);
  if (kSegments > 2) store_halves(row + padded + start, kWeight ? low : high_shifted);
  store_halves(row + int64_t{kSegments - 1} * padded + start, hi);
}

// Splits row `from` into row r of an operand, of a weight or not; beyond its end come zeros. A scale is a power of two
// with three parts. `half_sum` is half the row's sum and `*ratio` that of its largest to its mean magnitude, where
// asked for. The row's threads keep it in registers where it fits, kCount groups each: 4 bytes read an element then, 8
// of longer rows, and 2 * kParts written.
template <int kParts, bool kWeight, int kRowThreads, int kCount>
__device__ void split_row(Rows rows, int64_t from, int64_t r, Operand operand, float* half_sum, float* ratio) {
  const float* row = rows.data + from * rows.stride;
  const int cols = rows.cols;
  __half* to = operand.data + r * kParts * rows.padded;
  const bool is_aligned = aligned(rows.data, rows.stride);
  float v[kCount][kGroup];
  constexpr int kFit = kRowThreads * kCount * kGroup;
  const auto load_chunk = [&](int chunk) {
#pragma unroll
    for (int g = 0; g < kCount; ++g) load_group(v[g], row, group_start(chunk, g, kRowThreads), cols, is_aligned);
  };
  float largest = 0.f;
  double sum = 0, magnitude = 0;
  for (int chunk = 0; chunk < rows.padded; chunk += kFit) {
    load_chunk(chunk);
#pragma unroll
    for (int g = 0; g < kCount; ++g)
#pragma unroll
      for (int i = 0; i < kGroup; ++i) {
        largest = Max()(largest, fabsf(v[g][i]));
        if (kWeight && half_sum) sum += v[g][i], magnitude += fabsf(v[g][i]);
      }
  }
  largest = row_reduce(largest, Max());
  const bool finite = largest <= FLT_MAX;
  const int exponent = largest == 0.f ? 0 : finite ? ilogbf(largest) + 1 : kExponent;
  const float up =
      kParts == 1 && finite && largest > 0x1p-100f ? 0x1p14f / largest : ldexpf(1.f, min(kExponent - exponent, 126));
  int tiny = 0;
  for (int chunk = 0; chunk < rows.padded; chunk += kFit) {
    if (rows.padded > kFit) load_chunk(chunk);
#pragma unroll
    for (int g = 0; g < kCount; ++g) {
      const int start = group_start(chunk, g, kRowThreads);
      if (start >= rows.padded) continue;
#pragma unroll
      for (int i = 0; i < kGroup; ++i) {
        v[g][i] *= up;
        tiny += v[g][i] != 0.f && fabsf(v[g][i]) < Precision<kParts>::kTiny;
      }
      store_group<kParts, kWeight>(to, start, rows.padded, v[g]);
    }
  }
  tiny = row_reduce(tiny, Sum());
  if (kWeight && half_sum) sum = row_reduce(sum, Sum()), magnitude = row_reduce(magnitude, Sum());
  if (threadIdx.x == 0) {
    operand.scale[r] = largest == 0.f ? 0.f : 1.f / up;
    // A NaN needs no repair: it fills its row of the product by itself.
    const bool in_range = finite && abs(exponent) <= kExponentRange;
    operand.doubt[r] = isnan(largest) ? 0.f : in_range ? tiny * Precision<kParts>::kDoubtPerTiny : INFINITY;
    if (kWeight && half_sum) {
      *half_sum = static_cast<float>(sum / 2);
      *ratio = magnitude > 0 ? static_cast<float>(largest / (magnitude / cols)) : 0.f;
    }
  }
}

// Makes *largest at least `value`. Floats >= 0 order like the integers of the same bits, and the result is the same
// whatever the order in which threads come. It looks first, since atomics on one address take turns: for a weight of
// 128256 rows that took 0.15 ms.
__device__ void raise_to(float* largest, float value) {
  const float seen = *static_cast<volatile float*>(largest);  // maybe out of date, which costs but an atomic
  if (__float_as_int(value) > __float_as_int(seen)) atomicMax(reinterpret_cast<int*>(largest), __float_as_int(value));
}

// Splits the weights and rows of x, each row by a block, a warp or half of one. A weight's pad rows repeat its first,
// so that a product's pad columns change nothing of what is found about its row.
template <int kParts, int kRowThreads, int kCount>
__global__ void __launch_bounds__(kThreads) split_kernel(Weight w1, Weight w2, Rows rows, Operand operand) {
  wait_for_stream();
  constexpr int kRows = rows_per_block(kRowThreads);  // all of one matrix, since padded_rows is a multiple of 8
  const int64_t begin = int64_t{blockIdx.x} * kRows, begin_of_x = w1.padded_rows + w2.padded_rows;
  const int own = kRows > 1 ? threadIdx.y : 0;  // else 0 by itself, but for 8 registers more
  if (begin >= begin_of_x) {
    int64_t r = begin - begin_of_x + own;
    if (kRowThreads < 32) r = min(r, rows.count - 1);  // beyond the end the last again: shuffles need whole warps
    if (r < rows.count) split_row<kParts, false, kRowThreads, kCount>(rows, r, r, operand, nullptr, nullptr);
    return;
  }
  const bool second = begin >= w1.padded_rows;
  const Weight w = second ? w2 : w1;
  const int64_t r = begin - (second ? w1.padded_rows : 0) + own, from = r < w.rows ? r : 0;
  float ratio;  // thread 0's
  split_row<kParts, true, kRowThreads, kCount>({w.matrix, w.rows, w.cols, w.cols, w.padded_cols}, from, r, w.operand,
                                               second ? w.half_sum + r : nullptr, &ratio);
  if (threadIdx.x == 0) {
    w.padded_bias[r] = w.bias[from];
    if (!second) w.half_sum[r] = 0.f;
    w.centred_bias[r] = w.padded_bias[r] + w.half_sum[r];
    raise_to(w.largest_doubt, w.operand.doubt[r]);
    if (second) raise_to(w.largest_ratio, ratio);
    else raise_to(w.largest_scale, w.operand.scale[r]);
  }
}

// ---- Epilogues --------------------------------------------------------------------------------------------

// An element of a product, which may be float16: of a number beyond its range the nearest it has, if not infinite.
__device__ float load(const float* from) { return *from; }
__device__ float load(const __half* from) { return __half2float(*from); }
__device__ void store(float* to, float value) { *to = value; }
__device__ void store(__half* to, float value) {
  *to = __float2half_rn(fabsf(value) <= FLT_MAX ? fminf(fmaxf(value, -65504.f), 65504.f) : value);
}

// Whether a raw accumulator may be further from the product than float32's would be.
__device__ bool in_doubt(float raw, float doubt) { return doubt > 0.f && !(fabsf(raw) > doubt); }

// Where an element of a product's row (raw accumulators / unit) is in doubt, computes those elements anew in float32,
// puts the whole row into true units, adds the bias, and returns true. The caller is `thread` of `threads`, whole
// warps, which take 32 columns at a time; for each element in doubt a warp takes the dot product of the row that was
// split and the weight's row. `operand(k, w)` is an element of the former, at least as exact as its product with w must
// be. `centred`: it was split less 1/2.
template <typename Product, typename Row>
__device__ bool repair_row(Product* product, float unit, float row_scale, float row_doubt, bool centred,
                           const Row& operand, const Weight& weight, unsigned thread, unsigned threads) {
  if (!(row_doubt + *weight.largest_doubt > 0.f)) return false;
  bool any = false;
  for (int64_t j = thread; j < weight.rows; j += threads)
    any |= in_doubt(load(product + j) * unit, row_doubt + weight.operand.doubt[j]);
  if (!any_of_row(any)) return false;
  const int lane = thread % 32;
  for (int64_t base = thread - lane; base < weight.rows; base += threads) {
    const int64_t j = base + lane;
    const bool inside = j < weight.rows;
    float value = inside ? load(product + j) : 0.f;
    const bool doubted = inside && in_doubt(value * unit, row_doubt + weight.operand.doubt[j]);
    if (inside) value = value * row_scale * weight.operand.scale[j] + (centred ? weight.half_sum[j] : 0.f);
    for (unsigned left = __ballot_sync(~0u, doubted); left; left &= left - 1) {
      const int owner = __ffs(left) - 1;
      const float* row = weight.matrix + (base + owner) * weight.cols;
      float dot = 0.f;
      for (int64_t k = lane; k < weight.cols; k += 32) dot = fmaf(operand(k, row[k]), row[k], dot);
      dot = warp_reduce(dot, Sum());
      if (lane == owner) value = dot;
    }
    if (!inside) continue;
    value += weight.padded_bias[j];
    store(product + j, value);
    if (j == 0)
      for (int pad = weight.rows; pad < weight.padded_rows; ++pad) store(product + pad, value);
  }
  sync_row();
  return true;
}

// exp(x) by the hardware, off by (2 + abs(x)) 2^-24 relatively: 2 of its own, the rest what rounding x makes of it.
__device__ float fast_exp(float x) {
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x * 1.44269504f));
  return power;
}

__device__ float sigmoid(float z) {
  float h;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(h) : "f"(1.f + fast_exp(-z)));
  return h;
}

// What decides how a row is treated: the smallest magnitude of its product, the lowest h, the z nearest to 0, and the
// sum of h.
struct RowFacts {
  float smallest = INFINITY, lowest = INFINITY, nearest = INFINITY, sum = 0.f;

  // Combines the facts of two parts of a row.
  __device__ RowFacts operator+(RowFacts other) const {
    return {fminf(smallest, other.smallest), fminf(lowest, other.lowest), fminf(nearest, other.nearest),
            sum + other.sum};
  }
};

__device__ RowFacts from_neighbour(RowFacts facts, int offset) {
  return {from_neighbour(facts.smallest, offset), from_neighbour(facts.lowest, offset),
          from_neighbour(facts.nearest, offset), from_neighbour(facts.sum, offset)};
}

// With one barrier, or none in a warp; before the next call comes another (that of `repair_row`).
template <int kRowThreads>
__device__ RowFacts row_reduce(RowFacts facts) {
  constexpr int kWarps = kRowThreads / 32;
  __shared__ RowFacts partial[kWarps];
  facts = warp_reduce(facts, Sum());
  if (kWarps == 1) return facts;
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = facts;
  __syncthreads();
  return warp_reduce(partial[threadIdx.x % kWarps], Sum(), kWarps);
}

// h = sigmoid(z + b1) of one row of the first product, split as the second product's operand. h may be taken less 1/2
// ("centred"), which shortens the second product's sums: where the whole row is above 1/8, so that abs(h - 1/2) <= 3 h
// and nothing is lost; in the tf32 form also where the squares of h - 1/2 sum to less than those of h, and no row of W2
// is dominated by a few elements. One warp or block a row, in registers where it `kFits`, kCount groups a thread: 4
// bytes read, 2 of a float16 product, 2 * kParts written an element, and 4 more where h is kept in float32 for the
// gradients, in z's place.
//
// The rows that the product wrote last are still in the L2 cache, so they come first.
template <int kParts, typename Product, int kRowThreads, int kCount, bool kFits>
__global__ void __launch_bounds__(rows_per_block(kRowThreads) * kRowThreads,
                                  sigmoid_blocks(sizeof(Product), kRowThreads, kCount))
    bias_sigmoid_kernel(Hidden hidden, const float* __restrict__ next_largest_ratio, Operand operand,
                        bool* __restrict__ centred) {
  wait_for_stream();
  const Weight& weight = hidden.weight;
  constexpr int kRows = rows_per_block(kRowThreads);
  const int64_t r =  // written twice, since one form for both spills registers
      kRows == 1 ? gridDim.x - 1 - blockIdx.x : hidden.x.count - 1 - (blockIdx.x * int64_t{kRows} + threadIdx.y);
  if (kRows > 1 && r < 0) return;
  const int padded = weight.padded_rows;
  Product* row = static_cast<Product*>(hidden.product) + r * padded;
  const float row_scale = hidden.operand.scale[r] * hidden.correction * hidden.unit;
  constexpr int kChunk = kCount * kRowThreads * kGroup;
  constexpr bool kHalf = sizeof(Product) == sizeof(__half);
  float h[kCount][kGroup];
  RowFacts facts;
  bool repaired = false;
  const auto h_of_chunk = [&](int chunk) {
    unsigned start[kCount];  // beyond the row's end the last group is read again
#pragma unroll
    for (int g = 0; g < kCount; ++g) {  // all start before the first is waited for
      start[g] = min(group_start(chunk, g, kRowThreads), padded - kGroup);
      load_vector(h[g], row + start[g]);
    }
    const float factor = repaired ? 0.f : row_scale, alone = repaired ? 1.f : 0.f;  // repaired, the row is z
    const float* biases = repaired ? weight.half_sum : weight.padded_bias;
#pragma unroll
    for (int g = 0; g < kCount; ++g) {
      float scale[kGroup], bias[kGroup], sum = 0.f;
      load_vector(scale, weight.operand.scale + start[g]);
      load_vector(bias, biases + start[g]);
#pragma unroll
      for (int i = 0; i < kGroup; ++i) {
        facts.smallest = fminf(facts.smallest, fabsf(h[g][i]));
        const float z = fmaf(h[g][i], fmaf(factor, scale[i], alone), bias[i]);
        if (!kHalf && hidden.slope) facts.nearest = fminf(facts.nearest, fabsf(z));
        h[g][i] = sigmoid(z);
        facts.lowest = fminf(facts.lowest, h[g][i]);
        sum += h[g][i];
      }
      if (kParts == 1 && group_start(chunk, g, kRowThreads) < padded) facts.sum += sum;
    }
  };
  // A second time where an element may be in doubt. A loop, so that the code is there once: twice it would not fit the
  // registers.
  for (bool checked = false;; checked = true) {
    facts = {};
    if (kFits) h_of_chunk(0);
    else
      for (int chunk = 0; chunk < padded; chunk += kChunk) h_of_chunk(chunk);
    facts = row_reduce<kRowThreads>(facts);
    float doubt = hidden.operand.doubt[r];
    // Below 2^-14 a float16 is off by up to 2^-25: in z by more than 2^-13, where scales are that large.
    if (kHalf && row_scale * *weight.largest_scale > 0x1p12f) doubt += 0x1p-14f * hidden.unit;
    if (checked || !in_doubt(facts.smallest * hidden.unit, doubt + *weight.largest_doubt)) break;
    int64_t x_row = r;
    asm volatile("" : "+l"(x_row));  // or its address is made before the sweep, for which registers are few
    const auto x_element = [&](int64_t k, float) { return hidden.x.data[x_row * hidden.x.stride + k]; };
    repaired = repair_row(row, hidden.unit, row_scale, doubt, false, x_element, weight, threadIdx.x, blockDim.x);
  }
  const RowFacts found = facts;  // below, h_of_chunk may read what other threads have written
  const bool centre =
      found.lowest >= 0.125f || (kParts == 1 && found.sum >= 0.25f * padded && *next_largest_ratio <= 8.f);
  const float shift = centre ? -0x1p14f : 0.f;
  __half* to = operand.data + r * kParts * padded + threadIdx.x * kGroup;
  for (int chunk = 0; chunk == 0 || (!kFits && chunk < padded); chunk += kChunk) {
    if (!kFits) h_of_chunk(chunk);
#pragma unroll
    for (int g = 0; g < kCount; ++g) {
      const int start = group_start(chunk, g, kRowThreads);
      if (start >= padded) continue;
      if constexpr (!kHalf)
        if (hidden.slope) store_vector(row + start, h[g]);
#pragma unroll
      for (int i = 0; i < kGroup; ++i) h[g][i] = fmaf(h[g][i], 0x1p15f, shift);
      store_group<kParts, false>(to, chunk + g * kRowThreads * kGroup, padded, h[g]);
    }
  }
  if (threadIdx.x == 0) {
    const bool tiny = !centre && found.lowest * 0x1p15f < Precision<kParts>::kTiny;
    operand.doubt[r] = tiny ? padded * Precision<kParts>::kDoubtPerTiny : 0.f;
    centred[r] = centre;
    hidden.repaired[r] = repaired;
    if (hidden.slope) {
      const float h = sigmoid(-found.nearest), largest = h * (1.f - h);
      hidden.slope[r] = largest > 0.f ? ldexpf(1.f, ilogbf(largest) + 1) : 0.f;
    }
  }
}

// out = logsumexp(y + b2) of the rows of the second product, a block, a warp or a part of one a row; reads each logit
// once: 4 bytes an element, and 4 written where y + b2 is to be kept for the gradients, as `logits`, maybe in y's
// place. Each thread keeps its own maximum and the sum of exp(y - maximum). Not `kSplit` (the plain form): y is in true
// units, and a null bias is in it already.
template <bool kSplit>
__global__ void __launch_bounds__(kLargestBlock)
    bias_logsumexp_kernel(int64_t batch, float* product, int64_t stride, float row_scale, float* logits, Hidden hidden,
                          const float* __restrict__ doubt, const bool* __restrict__ centred, Weight weight,
                          float* __restrict__ out) {
  wait_for_stream();
  const int64_t index = batch - 1 - (blockIdx.x * int64_t{blockDim.y} + threadIdx.y), r = max(index, int64_t{0});
  const bool real = index >= 0;  // the threads beyond the batch, which shuffles need, read row 0 and store nothing
  const int cols = weight.rows, last = static_cast<int>(stride) - kGroup;
  float* row = product + r * stride;
  const bool row_aligned = kSplit || aligned(product, stride);
  float y[kSweep][kGroup], bias[kGroup], scale[kGroup];
  const auto group_at = [&](int chunk, int g) { return group_start(chunk, g, blockDim.x); };
  const auto load_chunk = [&](int chunk) {
    if (row_aligned) {  // without a branch, for all loads to start before the first is waited for
#pragma unroll
      for (int g = 0; g < kSweep; ++g) load_vector(y[g], row + min(group_at(chunk, g), last));
    } else {
#pragma unroll
      for (int g = 0; g < kSweep; ++g) load_group(y[g], row, group_at(chunk, g), cols, false);
    }
  };
  load_chunk(0);
  const bool centre = kSplit && centred[r];
  bool repaired = false;
  if (kSplit && __any_sync(~0u, doubt[r] + *weight.largest_doubt > 0.f)) {
    // Where rows share a warp, it takes one after the other.
    const unsigned threads = max(blockDim.x, 32u), sharing = threads / blockDim.x, own = threadIdx.y % sharing;
    for (unsigned i = 0; i < sharing; ++i) {
      const int64_t at = index + own - i;
      if (at < 0) break;
      const auto h = [&](int64_t k, float w) {
        const Weight& first = hidden.weight;
        const int64_t element = at * first.padded_rows + k;
        if (!hidden.half) {
          const float kept = static_cast<float*>(hidden.product)[element];
          if (hidden.slope) return kept;
          const float factor = hidden.operand.scale[at] * hidden.correction * first.operand.scale[k];
          return sigmoid(hidden.repaired[at] ? kept : fmaf(kept, factor, first.padded_bias[k]));
        }
        const float kept = load(static_cast<__half*>(hidden.product) + element);
        // Below 2^-29 h is off by up to 2^-40, which counts where it meets so large a weight that y is off by 2^-16.
        if (centred[at] || kept >= Precision<1>::kTiny || fabsf(w) * weight.cols <= 0x1p24f)
          return (kept + (centred[at] ? 0x1p14f : 0.f)) * 0x1p-15f;
        float z = first.padded_bias[k];
        for (int64_t c = 0; c < first.cols; ++c)
          z = fmaf(hidden.x.data[at * hidden.x.stride + c], first.matrix[k * first.cols + c], z);
        return sigmoid(z);
      };
      const bool found = repair_row(product + at * stride, 1.f, row_scale, doubt[at], centred[at], h, weight,
                                    own * blockDim.x + threadIdx.x, threads);
      if (i == own) repaired = found;
    }
    if (repaired) load_chunk(0);
  }
  const float* bias_row = !kSplit ? weight.bias : centre ? weight.centred_bias : weight.padded_bias;
  float largest = -INFINITY, sum = 0.f;
  bool nan = false;
  for (int chunk = 0; chunk < cols; chunk += kSweep * blockDim.x * kGroup) {
    if (chunk > 0) load_chunk(chunk);
    float top = largest;
#pragma unroll
    for (int g = 0; g < kSweep; ++g) {
      const int start = group_at(chunk, g);
      if constexpr (kSplit) {
        load_vector(bias, bias_row + min(start, last));
        load_vector(scale, weight.operand.scale + min(start, last));
      } else {
        load_group(bias, bias_row, start, bias_row ? cols : 0, aligned(bias_row, 0));
      }
#pragma unroll
      for (int i = 0; i < kGroup; ++i) {
        float& v = y[g][i];
        if (!repaired) v = fmaf(v, kSplit ? row_scale * scale[i] : 1.f, bias[i]);
        if (start + i >= cols) v = -INFINITY;
        nan |= isnan(v);
        top = fmaxf(top, v);
      }
    }
    if (logits && real)
#pragma unroll
      for (int g = 0; g < kSweep; ++g)
        if (group_at(chunk, g) < cols) store_vector(logits + r * weight.padded_rows + group_at(chunk, g), y[g]);
    if (top > largest) sum *= fast_exp(largest - top);
    largest = top;
    const float base = isinf(top) ? 0.f : top;  // an infinite maximum is the result itself, and inf - inf would be NaN
#pragma unroll
    for (int g = 0; g < kSweep; ++g)
#pragma unroll
      for (int i = 0; i < kGroup; ++i) sum += fast_exp(y[g][i] - base);
  }
  const float top = row_reduce(nan ? NAN : largest, Max());
  sum = row_reduce(top > largest ? sum * fast_exp(largest - top) : sum, Sum());
  if (threadIdx.x == 0 && real) out[r] = isinf(top) ? top : top + logf(sum);
}

// Calls `take` with row `begin`, with every `step`th after it below `end`, and with what `load` gives for it. kAtOnce
// rows are loaded before the first is taken, so that their loads are under way together.
template <int kAtOnce, typename Load, typename Take>
__device__ void each_row(int64_t begin, int64_t end, int64_t step, const Load& load, const Take& take) {
  for (int64_t first = begin; first < end; first += kAtOnce * step) {
    decltype(load(first)) loaded[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) loaded[i] = load(min(first + i * step, end - 1));
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i)
      if (first + i * step < end) take(first + i * step, loaded[i]);
  }
}

// A thread's strip of rows, and its first column. A block takes up to 512 columns, of as many strips as it has threads
// for; the blocks of longer rows lie side by side.
struct Strip {
  int64_t begin, end;
  int start;

  __device__ Strip(int64_t batch, int padded, int rows) {
    const int across = blocks_across(padded, blockDim.x);
    begin = (blockIdx.x / across * int64_t{blockDim.y} + threadIdx.y) * rows;
    end = min(begin + rows, batch);
    start = (blockIdx.x % across * blockDim.x + threadIdx.x) * kGroup;
  }

  __device__ bool empty(int padded) const { return begin >= end || start >= padded; }
};

// Calls `take` with each row of x in the strip: the thread's four columns of it, and what it weighs.
template <typename Take>
__device__ void each_weighed_row(const Strip& strip, RowFactors factors, const Rows& x, const Take& take) {
  struct Row {
    float x[kGroup], grad, slope;
  };
  const auto sweep = [&](const auto& load_columns) {
    const auto load = [&](int64_t r) {
      Row row;
      load_columns(row.x, x.data + r * x.stride);
      row.grad = factors.grad[r], row.slope = factors.slope[r];
      return row;
    };
    each_row<8>(strip.begin, strip.end, 1, load, take);
  };
  // The branch is outside the loop: inside, a warp with threads on both sides would wait at every row.
  if (aligned(x.data, x.stride) && strip.start + kGroup <= x.cols)
    sweep([&](float (&v)[kGroup], const float* row) { load_vector(v, row + strip.start); });
  else sweep([&](float (&v)[kGroup], const float* row) { load_group(v, row, strip.start, x.cols, false); });
}

// The plain form's h = sigmoid(z + b1), (batch, padded), maybe in z's place; where `bias` is null, z has it already.
// `slope`, if not null, is set to 1/4, the sigmoid's largest slope, for each row. Four neighbours a thread: 8 bytes an
// element.
__global__ void __launch_bounds__(kThreads)
    plain_bias_sigmoid_kernel(Rows z, const float* __restrict__ bias, float* h, float* __restrict__ slope) {
  wait_for_stream();
  const Strip strip(z.count, z.padded, 1);
  if (strip.empty(z.padded)) return;
  float v[kGroup], b[kGroup];
  load_group(v, z.data + strip.begin * z.stride, strip.start, z.cols, aligned(z.data, z.stride));
  load_group(b, bias, strip.start, bias ? z.cols : 0, aligned(bias, 0));
#pragma unroll
  for (int i = 0; i < kGroup; ++i) v[i] = strip.start + i < z.cols ? sigmoid(v[i] + b[i]) : 0.f;
  store_vector(h + strip.begin * z.padded + strip.start, v);
  if (slope && strip.start == 0) slope[strip.begin] = 0.25f;
}

// ---- Gradients --------------------------------------------------------------------------------------------
//
//     p = exp(y - out)    dh = p @ W2    dz = dh * h * (1 - h)    (each without its row's factor grad)
//     dW2 = p.T @ (grad h)    db2 = sum(grad p)    dW1 = dz.T @ (grad x)    db1 = sum(grad dz)    dx = grad * (dz @ W1)
//
// The same products of split operands; those that sum over the batch are made part by part. An operand has a scale for
// each of its rows where the sum runs along them, and for each column where it runs over the batch; p and dz are summed
// both ways and have none. p is at most 1. dz is taken in units of the scale that W2's column k was split
// with and of the row's `slope`, which bounds its h (1 - h): it stays below 2^15 then, as W2's column does. The units
// of k are given to W1's rows for dx, and to dW1's; those of a row to grad, which lies with x and h, so that a row with
// a large x but a small gradient does not set the scale of the others.
//
// Nothing is repaired here. Against float32 that loses what is small by itself: dW2 of an output whose p is below 1e-8
// in the whole batch, dW1 and dW2 of a hidden unit whose h (1 - h), or h, is.

// The power of two that keeps what is at most `bound` below 2^15.
__device__ float up_below(float bound) {
  return bound > 0.f && bound <= FLT_MAX ? ldexpf(1.f, max(-126, min(126, kExponent - 1 - ilogbf(bound)))) : 1.f;
}

// Over strips of rows the largest abs(grad slope x) of each column of x and, in the next column, the largest abs(grad):
// `bounds` (strips, padded + 8). Four columns a thread: 4 bytes read, 1/4 written an element.
__global__ void __launch_bounds__(kThreads)
    gradient_bounds_kernel(RowFactors factors, Rows x, float* __restrict__ bounds) {
  wait_for_stream();
  const Strip strip(x.count, x.padded, kStrip);
  if (strip.empty(x.padded)) return;
  float largest[kGroup] = {}, largest_grad = 0.f;
  each_weighed_row(strip, factors, x, [&](int64_t, const auto& row) {
    const float grad = fabsf(row.grad), weight = grad * row.slope;
    largest_grad = Max()(largest_grad, grad);
#pragma unroll
    for (int i = 0; i < kGroup; ++i) largest[i] = Max()(largest[i], fabsf(row.x[i]) * weight);
  });
  float* to = bounds + strip.begin / kStrip * (x.padded + 8);
  store_vector(to + strip.start, largest);
  if (strip.start == 0) to[x.padded] = largest_grad;
}

// to (shares, size) = the sums, or the largest of elements not below 0, of the columns of from (count, stride), over
// shares of its rows, of which the last may be short or empty. blockIdx.y is the share; a thread takes four columns,
// some maybe beyond `size`, but within `stride`, a multiple of 4; threadIdx.y shares a column's rows. 4 bytes read an
// element.
template <typename Op>
__global__ void __launch_bounds__(kLargestBlock)
    reduce_columns_kernel(const float* __restrict__ from, int64_t count, int64_t stride, int64_t size,
                          float* __restrict__ to) {
  wait_for_stream();
  const int64_t start = (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) * kGroup;
  const int64_t share = (count + gridDim.y - 1) / gridDim.y, end = min(share * (blockIdx.y + 1), count);
  struct Row {
    float v[kGroup];
  };
  const auto load = [&](int64_t r) {
    Row row;
    load_vector(row.v, from + r * stride + start);
    return row;
  };
  float result[kGroup] = {};
  const auto take = [&](int64_t, const Row& row) {
#pragma unroll
    for (int i = 0; i < kGroup; ++i) result[i] = Op()(result[i], row.v[i]);
  };
  if (start < size) each_row<8>(share * blockIdx.y + threadIdx.y, end, blockDim.y, load, take);

  __shared__ __align__(16) float partial[kLargestBlock][kGroup];
  const unsigned own = threadIdx.y * blockDim.x + threadIdx.x;
  for (unsigned half = blockDim.y / 2; half > 0; half /= 2) {
    store_vector(partial[own], result);
    __syncthreads();
    if (threadIdx.y < half) {
      Row other;
      load_vector(other.v, partial[own + half * blockDim.x]);
      take(0, other);
    }
    __syncthreads();  // before the next round overwrites what this one reads
  }
  if (threadIdx.y == 0)
    for (int i = 0; i < kGroup && start + i < size; ++i) to[blockIdx.y * size + start + i] = result[i];
}

// Puts in the place of bounds the scales: what undoes the powers of two that keep below 2^15 what they bound.
__global__ void __launch_bounds__(kThreads) bounds_to_scales_kernel(float* bounds, int count) {
  wait_for_stream();
  const int i = blockIdx.x * kThreads + threadIdx.x;
  if (i < count) bounds[i] = 1.f / up_below(bounds[i]);
}

// p, (batch, padded), and the sums of grad p over strips of rows, (strips, padded), four columns a thread: 4 bytes
// read, 2 * kParts written an element; plain: grad p, 4 written. `y` holds the logits, bias included.
template <int kParts>
__global__ void __launch_bounds__(kThreads)
    softmax_gradient_kernel(const float* __restrict__ grad, const float* __restrict__ y, const float* __restrict__ out,
                            int64_t batch, int cols, int padded, __half* __restrict__ operand,
                            float* __restrict__ plain, float* __restrict__ sums) {
  wait_for_stream();
  const Strip strip(batch, padded, kStrip);
  if (strip.empty(padded)) return;
  struct Row {
    float y[kGroup], out, grad;
  };
  const auto load = [&](int64_t r) {
    Row row;
    load_vector(row.y, y + r * padded + strip.start);
    row.out = out[r], row.grad = grad[r];
    return row;
  };
  float sum[kGroup] = {};
  each_row<8>(strip.begin, strip.end, 1, load, [&](int64_t r, const Row& row) {
    float p[kGroup];
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      p[i] = strip.start + i < cols ? fast_exp(row.y[i] - row.out) : 0.f;
      sum[i] += p[i] * row.grad;
      p[i] *= kParts ? kUpP : row.grad;
    }
    if constexpr (kParts == 0) store_vector(plain + r * padded + strip.start, p);
    else store_group<kParts, true>(operand + r * kParts * padded, strip.start, padded, p);
  });
  store_vector(sums + strip.begin / kStrip * padded + strip.start, sum);
}

// dz from dh, (batch, padded), and the sums of grad dz over strips of rows; in the same sweep the operand grad h. As
// `softmax_gradient`: 8 bytes read, 10 (one part: 4) written an element; plain: with grad already in dh, 4, in dh's
// place. Without dh only grad h is made, without `h_operand` it is not.
template <int kParts>
__global__ void __launch_bounds__(kThreads)
    sigmoid_gradient_kernel(float* __restrict__ dh, const float* __restrict__ h, RowFactors factors, int64_t batch,
                            int padded, float correction, const float* __restrict__ w2_scale,
                            const float* __restrict__ grad_scale, __half* __restrict__ operand,
                            __half* __restrict__ h_operand, float* __restrict__ sums) {
  wait_for_stream();
  constexpr int kSegments = batch_segments(kParts);
  const Strip strip(batch, padded, kStrip);
  if (strip.empty(padded)) return;
  struct Row {
    float dh[kGroup], h[kGroup], grad, slope;
  };
  const auto load = [&](int64_t r) {
    Row row;
    if (dh) load_vector(row.dh, dh + r * padded + strip.start);
    load_vector(row.h, h + r * padded + strip.start);
    row.grad = kParts ? factors.grad[r] : 1.f, row.slope = kParts ? factors.slope[r] : 1.f;
    return row;
  };
  const float up = h_operand ? 1.f / *grad_scale : 0.f;
  // W2's scale is undone before grad is multiplied in: dz in its units, times a huge grad, would overflow.
  float sum[kGroup] = {}, scale[kGroup];
  if (kParts && dh) load_vector(scale, w2_scale + strip.start);
  // Four: a row is twice as long here.
  each_row<4>(strip.begin, strip.end, 1, load, [&](int64_t r, const Row& row) {
    float v[kGroup];
    if (dh) {
      const float unit = row.slope > 0.f ? 1.f / row.slope : 0.f;
#pragma unroll
      for (int i = 0; i < kGroup; ++i) {
        v[i] = row.dh[i] * (correction * (row.h[i] * (1.f - row.h[i])));
        sum[i] += (kParts ? v[i] * scale[i] : v[i]) * row.grad;
        v[i] *= unit;
      }
      if constexpr (kParts == 0) store_vector(dh + r * padded + strip.start, v);
      else store_group<kParts, true>(operand + r * kParts * padded, strip.start, padded, v);
    }
    if constexpr (kParts != 0) {
      if (h_operand) {
#pragma unroll
        for (int i = 0; i < kGroup; ++i) v[i] = row.h[i] * (row.grad * up);
        store_group<kSegments, false>(h_operand + r * kSegments * padded, strip.start, padded, v);
      }
    }
  });
  if (dh) store_vector(sums + strip.begin / kStrip * padded + strip.start, sum);
}

// The operand grad slope x, (batch, kSegments * padded): 4 bytes read, 2 * kSegments written an element.
template <int kParts>
__global__ void __launch_bounds__(kThreads)
    weigh_rows_kernel(RowFactors factors, Rows x, const float* __restrict__ x_scale, __half* __restrict__ operand) {
  wait_for_stream();
  constexpr int kSegments = batch_segments(kParts);
  const Strip strip(x.count, x.padded, kStrip);
  if (strip.empty(x.padded)) return;
  float up[kGroup];
  load_vector(up, x_scale + strip.start);
#pragma unroll
  for (int i = 0; i < kGroup; ++i) up[i] = 1.f / up[i];
  each_weighed_row(strip, factors, x, [&](int64_t r, const auto& row) {
    float v[kGroup];
#pragma unroll
    for (int i = 0; i < kGroup; ++i) v[i] = row.x[i] * (row.grad * row.slope) * up[i];
    store_group<kSegments, false>(operand + r * kSegments * x.padded, strip.start, x.padded, v);
  });
}

// to (rows, cols) = from (rows, padded) * factor and the scales: 4 bytes read, 4 written an element. A thread loads
// four before it stores the first.
__global__ void __launch_bounds__(kThreads)
    unscale_kernel(const float* __restrict__ from, int64_t rows, int cols, int padded, float factor, Scales scales,
                   float* __restrict__ to) {
  wait_for_stream();
  const auto at = [](const float* scale, int64_t i) { return scale ? scale[i] : 1.0; };  // no product overflows double
  for (int64_t r = blockIdx.x * int64_t{blockDim.y} + threadIdx.y; r < rows; r += gridDim.x * int64_t{blockDim.y}) {
    const double row_factor = factor * at(scales.all, 0) * at(scales.row, r) * at(scales.row2, r);
    for (int begin = threadIdx.x; begin < cols; begin += kGroup * blockDim.x) {
      const auto column = [&](int g) { return begin + g * static_cast<int>(blockDim.x); };
      float v[kGroup];
#pragma unroll
      for (int g = 0; g < kGroup; ++g) v[g] = from[r * padded + min(column(g), cols - 1)];
#pragma unroll
      for (int g = 0; g < kGroup; ++g)
        if (column(g) < cols)
          to[r * cols + column(g)] = static_cast<float>(v[g] * (row_factor * at(scales.column, column(g))));
    }
  }
}

// ---- Launchers --------------------------------------------------------------------------------------------

// Launches a kernel that may be set up while the one before it in the stream ends, where it is compiled to wait for it.
template <typename... Parameters, typename... Arguments>
cudaError_t launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, cudaStream_t stream, Arguments... arguments) {
  cudaFuncAttributes compiled;  // for an older GPU's PTX the kernel has no wait, whatever GPU it runs on
  const cudaError_t error = cudaFuncGetAttributes(&compiled, kernel);
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid, config.blockDim = block, config.stream = stream;
  config.attrs = &overlap, config.numAttrs = compiled.ptxVersion >= 90;
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

// Launches a kernel that gives each row so many threads.
template <typename Kernel, typename... Arguments>
cudaError_t launch_rows(Kernel kernel, int64_t rows, int threads, cudaStream_t stream, Arguments... arguments) {
  const dim3 block(threads, rows_per_block(threads));
  return launch(kernel, (rows + block.y - 1) / block.y, block, stream, arguments...);
}

// The kernel for rows of so many columns, and the threads of a row: up to 2048 columns it reads them once.
template <int kParts>
std::pair<decltype(&split_kernel<kParts, 32, 1>), int> split_kernel_for(int cols) {
  if (cols <= 64) return {split_kernel<kParts, 16, 1>, 16};
  if (cols <= 128) return {split_kernel<kParts, 32, 1>, 32};
  if (cols <= 256) return {split_kernel<kParts, 32, 2>, 32};
  if (cols <= 512) return {split_kernel<kParts, 32, 4>, 32};
  if (cols <= 1024) return {split_kernel<kParts, 32, 8>, 32};
  return {split_kernel<kParts, kThreads, 4>, kThreads};
}

cudaError_t split(int parts, Weight w1, Weight w2, Rows rows, Operand operand, cudaStream_t stream) {
  const auto kernel_for = parts == 3 ? split_kernel_for<3> : split_kernel_for<1>;
  const auto split_by = [&](auto kernel, Weight w1, Weight w2, Rows rows) {
    return launch_rows(kernel.first, w1.padded_rows + w2.padded_rows + rows.count, kernel.second, stream, w1, w2, rows,
                       operand);
  };
  const auto kernel = kernel_for(rows.padded), kernel2 = kernel_for(w2.padded_cols);  // W1's rows are as long as x's
  if (kernel == kernel2 || w2.rows == 0) return split_by(kernel, w1, w2, rows);
  const cudaError_t error = split_by(kernel, w1, {}, rows);
  return error == cudaSuccess ? split_by(kernel2, {}, w2, {}) : error;
}

// The smallest kernel that holds a row in registers, if one does: on an H200 the one for 4096 columns takes as long for
// the shortest rows. A row of up to 1024 columns is a warp's, which needs no barrier.
template <int kParts, typename Product>
cudaError_t bias_sigmoid_of(Hidden hidden, const float* next_largest_ratio, Operand operand, bool* centred,
                            cudaStream_t stream) {
  const int cols = hidden.weight.padded_rows;
  const auto run = [&](auto kernel, int threads) {
    return launch_rows(kernel, hidden.x.count, threads, stream, hidden, next_largest_ratio, operand, centred);
  };
  if (cols <= 128) return run(bias_sigmoid_kernel<kParts, Product, 32, 1, true>, 32);
  if (cols <= 256) return run(bias_sigmoid_kernel<kParts, Product, 32, 2, true>, 32);
  if (cols <= 512) return run(bias_sigmoid_kernel<kParts, Product, 32, 4, true>, 32);
  if (cols <= 1024) return run(bias_sigmoid_kernel<kParts, Product, 32, 8, true>, 32);
  if (cols <= 2048) return run(bias_sigmoid_kernel<kParts, Product, 64, 8, true>, 64);
  if (cols <= 3072) return run(bias_sigmoid_kernel<kParts, Product, 128, 6, true>, 128);
  if (cols <= 4096) return run(bias_sigmoid_kernel<kParts, Product, 128, 8, true>, 128);
  return run(bias_sigmoid_kernel<kParts, Product, 128, 2, false>, 128);
}

cudaError_t bias_sigmoid(int parts, Hidden hidden, const float* next_largest_ratio, Operand operand, bool* centred,
                         cudaStream_t stream) {
  const auto launch_of = hidden.half  ? bias_sigmoid_of<1, __half>
                         : parts == 1 ? bias_sigmoid_of<1, float>
                                      : bias_sigmoid_of<3, float>;
  return launch_of(hidden, next_largest_ratio, operand, centred, stream);
}

// A block of kThreads threads, of which each row has the fewest that take all its columns at once: a power of two.
dim3 block_of_rows(int cols) {
  int threads = 1;
  while (threads < kThreads && threads * kGroup < cols) threads *= 2;
  return dim3(threads, kThreads / threads);
}

cudaError_t bias_logsumexp(int parts, int64_t batch, float* product, int64_t stride, float row_scale, float* logits,
                           Hidden hidden, const float* doubt, const bool* centred, Weight weight, float* out,
                           cudaStream_t stream) {
  // Enough to read a row in one sweep, but of up to 4096 logits no more than a warp, of more no more than kThreads,
  // unless rows are too few to fill the GPU.
  const int most = weight.rows <= 4096 ? 32 : kThreads;
  int threads = 1;
  while (threads * kSweep * kGroup < weight.rows &&
         (threads < most || (batch * threads < kEnoughThreads && threads < kLargestBlock)))
    threads *= 2;
  return launch_rows(parts ? bias_logsumexp_kernel<true> : bias_logsumexp_kernel<false>, batch, threads, stream, batch,
                     product, stride, row_scale, logits, hidden, doubt, centred, weight, out);
}

// Launches a kernel over strips of so many rows.
template <typename Kernel, typename... Arguments>
cudaError_t launch_strips(Kernel kernel, int64_t batch, int padded, int rows, cudaStream_t stream,
                          Arguments... arguments) {
  const dim3 block = block_of_rows(padded);
  const int64_t strips = (batch + rows - 1) / rows;
  return launch(kernel, (strips + block.y - 1) / block.y * blocks_across(padded, block.x), block, stream, arguments...);
}

cudaError_t plain_bias_sigmoid(Rows z, const float* bias, float* h, float* slope, cudaStream_t stream) {
  return launch_strips(plain_bias_sigmoid_kernel, z.count, z.padded, 1, stream, z, bias, h, slope);
}

cudaError_t gradient_bounds(RowFactors factors, Rows x, float* bounds, cudaStream_t stream) {
  return launch_strips(gradient_bounds_kernel, x.count, x.padded, kStrip, stream, factors, x, bounds);
}

cudaError_t reduce_columns(bool to_largest, const float* from, int64_t count, int64_t stride, int64_t size, int shares,
                           float* to, cudaStream_t stream) {
  const int64_t groups = (size + kGroup - 1) / kGroup;
  // Threads side by side: 8 read 128 bytes. Threads that share a column's rows: until the GPU is full. Where both are
  // few, more side by side.
  int across = 1, together = 1;
  while (across < 8 && across < groups) across *= 2;
  while (together < count && across * together < kLargestBlock && groups * together < kEnoughThreads) together *= 2;
  if (across * together < kThreads) across = kThreads / together;
  return launch(to_largest ? reduce_columns_kernel<Max> : reduce_columns_kernel<Sum>,
                dim3((groups + across - 1) / across, shares), dim3(across, together), stream, from, count, stride, size,
                to);
}

cudaError_t bounds_to_scales(float* bounds, int count, cudaStream_t stream) {
  return launch(bounds_to_scales_kernel, (count + kThreads - 1) / kThreads, kThreads, stream, bounds, count);
}

cudaError_t softmax_gradient(int parts, const float* grad, const float* y, const float* out, int64_t batch, int cols,
                             int padded, __half* operand, float* plain, float* sums, cudaStream_t stream) {
  const auto kernel = parts == 3   ? softmax_gradient_kernel<3>
                      : parts == 1 ? softmax_gradient_kernel<1>
                                   : softmax_gradient_kernel<0>;
  return launch_strips(kernel, batch, padded, kStrip, stream, grad, y, out, batch, cols, padded, operand, plain, sums);
}

cudaError_t sigmoid_gradient(int parts, float* dh, const float* h, RowFactors factors, int64_t batch, int padded,
                             float correction, const float* w2_scale, const float* grad_scale, __half* operand,
                             __half* h_operand, float* sums, cudaStream_t stream) {
  const auto kernel = parts == 3   ? sigmoid_gradient_kernel<3>
                      : parts == 1 ? sigmoid_gradient_kernel<1>
                                   : sigmoid_gradient_kernel<0>;
  return launch_strips(kernel, batch, padded, kStrip, stream, dh, h, factors, batch, padded,
                       parts ? correction / kUpP : 1.f, w2_scale, grad_scale, operand, h_operand, sums);
}

cudaError_t weigh_rows(int parts, RowFactors factors, Rows x, const float* x_scale, __half* operand,
                       cudaStream_t stream) {
  return launch_strips(parts == 3 ? weigh_rows_kernel<3> : weigh_rows_kernel<1>, x.count, x.padded, kStrip, stream,
                       factors, x, x_scale, operand);
}

cudaError_t unscale(const float* from, int64_t rows, int cols, int padded, float factor, Scales scales, float* to,
                    cudaStream_t stream) {
  const dim3 block = block_of_rows(cols);
  const int64_t blocks = (rows + block.y - 1) / block.y;
  return launch(unscale_kernel, blocks < 65536 ? blocks : 65536, block, stream, from, rows, cols, padded, factor,
                scales, to);
}
"""
)

# The GEMMs and the operators, for the host compiler: PyTorch's headers take nvcc four times as long.
CPP_SOURCE = (
    DECLARATIONS
    + r"""
#include <ATen/core/Tensor.h>
#include <ATen/cuda/CUDAContextLight.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/mul.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cublasLt.h>
#include <torch/library.h>

#include <algorithm>
#include <climits>
#include <cmath>
#include <map>
#include <mutex>
#include <tuple>

namespace {

using at::Tensor;

int64_t pad(int64_t n) { return (n + 7) / 8 * 8; }  // 16 bytes of float16
int64_t strips_of(int64_t batch) { return (batch + kStrip - 1) / kStrip; }

float* floats(const Tensor& t) { return t.mutable_data_ptr<float>(); }
__half* halves(const Tensor& t) { return static_cast<__half*>(t.mutable_data_ptr()); }
Tensor empty(at::IntArrayRef sizes, const Tensor& like, at::ScalarType dtype = at::kFloat) {
  return at::empty(sizes, like.options().dtype(dtype));
}

// ---- GEMM --------------------------------------------------------------------------------------------

#define CHECK_CUBLAS(call)                                                                      \
  do {                                                                                          \
    const cublasStatus_t status = (call);                                                       \
    TORCH_CHECK(status == CUBLAS_STATUS_SUCCESS, #call, ": ", cublasLtGetStatusString(status)); \
  } while (0)

// The sizes of product (rows, cols) = operand (rows, k) @ weight (cols, k).T or, `over_rows`, operand (k, rows).T @
// weight (k, cols); the strides are those of the operands' rows. `count` such products are made at once, their matrices
// one behind the other.
struct Shape {
  int64_t rows, cols, k, operand_stride, weight_stride;
  bool over_rows, half_product;
  int64_t count = 1;

  bool operator<(const Shape& other) const {
    const auto key = [](const Shape& s) {
      return std::make_tuple(s.rows, s.cols, s.k, s.operand_stride, s.weight_stride, s.over_rows, s.half_product,
                             s.count);
    };
    return key(*this) < key(other);
  }
};

// Such a product, float16 in, float32 or float16 out, all row-major. cuBLAS is column-major, where a row-major matrix
// is its own transpose. So it is asked for product.T (cols, rows) = weight @ operand.T: in its eyes the memory of
// weight is (k, cols), to be transposed, and that of operand (k, rows); over rows (cols, k), and (rows, k), to be
// transposed.
struct Gemm {
  cublasLtMatmulDescOpaque_t operation;
  cublasLtMatrixLayoutOpaque_t weight, operand, product;
  cublasLtMatmulAlgo_t algorithm;

  Gemm(cublasLtHandle_t handle, const Shape& s) {
    const cublasOperation_t a = s.over_rows ? CUBLAS_OP_N : CUBLAS_OP_T, b = s.over_rows ? CUBLAS_OP_T : CUBLAS_OP_N;
    const auto layout = [&](cublasLtMatrixLayoutOpaque_t& matrix, cudaDataType_t type, int64_t rows, int64_t cols,
                            int64_t stride) {
      const auto count = static_cast<int32_t>(s.count);
      const int64_t distance = cols * stride;
      CHECK_CUBLAS(cublasLtMatrixLayoutInit(&matrix, type, rows, cols, stride));
      CHECK_CUBLAS(
          cublasLtMatrixLayoutSetAttribute(&matrix, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &count, sizeof(count)));
      CHECK_CUBLAS(cublasLtMatrixLayoutSetAttribute(&matrix, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &distance,
                                                    sizeof(distance)));
    };
    CHECK_CUBLAS(cublasLtMatmulDescInit(&operation, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    CHECK_CUBLAS(cublasLtMatmulDescSetAttribute(&operation, CUBLASLT_MATMUL_DESC_TRANSA, &a, sizeof(a)));
    CHECK_CUBLAS(cublasLtMatmulDescSetAttribute(&operation, CUBLASLT_MATMUL_DESC_TRANSB, &b, sizeof(b)));
    layout(weight, CUDA_R_16F, s.over_rows ? s.cols : s.k, s.over_rows ? s.k : s.cols, s.weight_stride);
    layout(operand, CUDA_R_16F, s.over_rows ? s.rows : s.k, s.over_rows ? s.k : s.rows, s.operand_stride);
    layout(product, s.half_product ? CUDA_R_16F : CUDA_R_32F, s.cols, s.rows, s.cols);
    cublasLtMatmulPreferenceOpaque_t preference;  // as it is initialised it allows no workspace, and so no split-K
    CHECK_CUBLAS(cublasLtMatmulPreferenceInit(&preference));
    const uint32_t alignment = 16;  // that of a segment, in bytes
    for (const auto matrix : {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
                              CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES})
      CHECK_CUBLAS(cublasLtMatmulPreferenceSetAttribute(&preference, matrix, &alignment, sizeof(alignment)));
    cublasLtMatmulHeuristicResult_t found[8];
    int count = 0;
    CHECK_CUBLAS(cublasLtMatmulAlgoGetHeuristic(handle, &operation, &weight, &operand, &product, &product, &preference,
                                                8, found, &count));
    TORCH_CHECK(count > 0, "cuBLAS has no algorithm for a float16 product of ", s.rows, " x ", s.cols, " x ", s.k);
    // Measured on an H200: tiles of 128 x 128 (or 160) in clusters of two are 2 to 12 % faster than cuBLAS's first
    // suggestion (256 x 128): two fit on a multiprocessor, and one computes while the other writes. The bits of
    // a float32 product are the same.
    int chosen = 0, best = 0;
    for (int i = 0; i < count; ++i) {
      uint32_t tile = 0;
      uint16_t cluster = 0;
      cublasLtMatmulAlgoConfigGetAttribute(&found[i].algo, CUBLASLT_ALGO_CONFIG_TILE_ID, &tile, sizeof(tile), nullptr);
      cublasLtMatmulAlgoConfigGetAttribute(&found[i].algo, CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID, &cluster,
                                           sizeof(cluster), nullptr);
      const bool paired = cluster == CUBLASLT_CLUSTER_SHAPE_2x1x1;
      const int rank = paired * (2 * (tile == CUBLASLT_MATMUL_TILE_128x128) + (tile == CUBLASLT_MATMUL_TILE_128x160));
      if (rank > best) chosen = i, best = rank;
    }
    algorithm = found[chosen].algo;
  }
};

void gemm(const Shape& shape, const __half* operand, const __half* weight, void* product, cudaStream_t stream,
          bool add = false, float alpha = 1.f) {
  static std::mutex mutex;
  static std::map<std::pair<int, Shape>, Gemm> plans;  // asking cuBLAS takes microseconds
  const auto handle = at::cuda::getCurrentCUDABlasLtHandle();
  const auto planned = [&] {
    const std::lock_guard<std::mutex> lock(mutex);
    const auto key = std::make_pair(int{c10::cuda::current_device()}, shape);
    auto found = plans.find(key);
    if (found == plans.end()) {
      if (plans.size() == 1024) plans.clear();  // of a program whose batch is never twice the same
      found = plans.emplace(key, Gemm(handle, shape)).first;
    }
    return found->second;
  };
  Gemm plan = planned();
  const float beta = add ? 1.f : 0.f;
  CHECK_CUBLAS(cublasLtMatmul(handle, &plan.operation,                                //
                              &alpha, weight, &plan.weight,                           // A
                              operand, &plan.operand,                                 // B
                              &beta, product, &plan.product, product, &plan.product,  // C and D
                              &plan.algorithm, /*workspace=*/nullptr, 0, stream));
}

// A tensor core truncates at each step of 16 along K. On average a sum loses 0.14 * 2^-23 of its final value a step:
// measured on sm_90 at K = 2048 and 4096, for uniform and normal data, and taken out by this factor; not known
// elsewhere.
float correction(int64_t k) {
  return static_cast<float>(1 + (at::cuda::getCurrentDeviceProperties()->major == 9 ? 0.14 * 0x1p-23 * k / 16 : 0.));
}

// What is lost varies about that average, and more the longer the sum, so a long one is made in equal pieces, which
// float32 adds. Measured with three parts at the problem's sizes, on its five kinds of data: the error of `out` is 0.8
// to 2.6 times eager float32's with whole sums, 0.4 to 1.5 times with pieces of 2048 terms (time + 1 %), 0.2 to 1.1
// times with 1024 (+ 8 %), which is what the gradients need to be as good. Operands of 11 bits gain nothing by it. Sums
// longer than those measured are not left whole.
int64_t longest_piece(int parts, bool for_gradients) { return parts == 3 && for_gradients ? 1024 : 8192; }

// The length of each of the fewest equal pieces of k terms; the last may be shorter by up to 7 a piece.
int64_t piece(int64_t k, int64_t longest) {
  const int64_t count = (k + longest - 1) / longest;
  return pad((k + count - 1) / count);
}

// product (rows, cols) = operand (rows, parts * k) @ weight (cols, parts * k).T, hi * hi in pieces of `step`; it wants
// `correction(step)`.
void gemm_along(int parts, int64_t rows, int64_t cols, int64_t k, int64_t step, const __half* operand,
                const __half* weight, float* product, cudaStream_t stream) {
  const int64_t stride = parts * k;
  for (int64_t begin = 0, end = stride - k + std::min(k, step); begin < stride;
       begin = end, end = std::min(stride, end + step))
    gemm({rows, cols, end - begin, stride, stride, false, false}, operand + begin, weight + begin, product, stream,
         begin > 0);
}

// Split-K over k rows of the batch: how many partial products, of 256 terms or more, are made at once, so that their
// tiles fill the GPU. On an H200 that takes training at 262144 x 64 -> 128 -> 10 from 4.4 to 1.0 ms.
int64_t partial_products(int64_t rows, int64_t cols, int64_t k) {
  const int64_t tiles = (rows + 127) / 128 * ((cols + 127) / 128);
  return std::max<int64_t>(1, std::min(at::cuda::getCurrentDeviceProperties()->multiProcessorCount / tiles, k / 256));
}

// partial (count, rows, cols), whose sum is the product, += operand (k, parts * rows).T @ factor (k, batch_segments *
// cols): the small parts first, what is truncated put back (`correction`). `operand` (p or dz) is stored as a weight
// is, [hi/64 | 64 lo | hi]; `factor` (grad h or grad slope x) as [64 lo | hi]. The `first` time the first of the
// products overwrites `partial`: k must be what `partial_products` was given, so that it covers all `count` matrices.
void gemm_over_batch(int parts, int64_t k, const __half* operand, const __half* factor, const Tensor& partial,
                     bool first, cudaStream_t stream) {
  const int64_t count = partial.size(0), rows = partial.size(1), cols = partial.size(2);
  const int64_t segments = batch_segments(parts);
  bool add = !first;
  for (int part = 0; part < parts; ++part) {
    const bool small = part < parts - 1;
    const int64_t segment = part == 0 ? 0 : segments - 1;  // 64 lo meets the operand's hi/64; hi the other two
    const float shift = part == 1 ? 1 / kShift : 1.f;      // for 64 lo times hi
    const int64_t longest = small ? k : longest_piece(parts, true);
    const int64_t pieces = count * ((k + count * longest - 1) / (count * longest));
    // Rounded down where that leaves a short rest, which alone does not fill the GPU.
    const int64_t step = count > 1 ? std::max<int64_t>(1, k / pieces) : (k + pieces - 1) / pieces;
    for (int64_t begin = 0, terms, together; begin < k; begin += terms * together) {
      terms = std::min(step, k - begin), together = std::min(count, (k - begin) / terms);
      gemm({rows, cols, terms, parts * rows, segments * cols, true, false, together},
           operand + (begin * parts + part) * rows, factor + (begin * segments + segment) * cols, floats(partial),
           stream, add, small ? shift : correction(terms));
      add = true;
    }
  }
}

// ---- Forms --------------------------------------------------------------------------------------------

// The tensors that hold the memory of a Weight's operand and of what is known of its rows.
struct WeightMemory {
  Tensor operand, facts;
  Weight view;

  WeightMemory(int parts, const Tensor& weight, const Tensor& bias, float* largest) {  // (3)
    const int rows = weight.size(0), cols = weight.size(1), rows8 = pad(rows), cols8 = pad(cols);
    operand = empty({rows8, int64_t{parts} * cols8}, weight, at::kHalf);
    facts = empty({5, rows8}, weight);
    const auto fact = [&](int64_t i) { return floats(facts) + i * rows8; };
    view = {weight.const_data_ptr<float>(),
            bias.const_data_ptr<float>(),
            rows,
            cols,
            rows8,
            cols8,
            {halves(operand), fact(0), fact(1)},
            fact(2),
            fact(3),
            fact(4),
            largest,
            largest + 1,
            largest + 2};
  }
};

// Rows of x, from `begin` on.
Rows rows_at(const Tensor& x, int64_t begin, int64_t count) {
  return {x.const_data_ptr<float>() + begin * x.stride(0), count, x.stride(0), static_cast<int>(x.size(1)),
          static_cast<int>(pad(x.size(1)))};
}

// Elements of the widest matrix at a time, which bounds the memory: in inference at the problem's sizes less than half
// of what eager PyTorch takes, in whole waves of tiles.
int64_t forward_elements(int parts, bool kept) {
  return int64_t{1} << (parts == 1 ? 26 : kept ? 25 : 24);  // kept: at those sizes no more than backward takes
}

// The same for backward.
int64_t backward_elements(int parts) { return int64_t{1} << (parts == 1 ? 25 : 24); }

// So many rows of the batch that the widest matrix has that many elements, in whole tiles of 128 rows, but at least
// one.
int64_t slice_rows(int64_t elements, int64_t batch, int64_t widest) {
  const int64_t rows = elements / widest / 128 * 128;
  return std::min(batch, std::max<int64_t>(rows, 128));
}

// What the gradients need of the forward: h (batch, padded hidden), y + b2 (batch, padded output), `slope` (batch). The
// plain form bounds every slope by the sigmoid's largest: should the precision be another by then, its gradients may be
// made by the split form.
struct Kept {
  Tensor h, y, slope;
};

// Float16 products on the tensor cores.
void split_form(int parts, const Tensor& x, const Tensor& weight1, const Tensor& bias1, const Tensor& weight2,
                const Tensor& bias2, const Tensor& out, Kept* kept, cudaStream_t stream) {
  const int64_t batch = x.size(0), input8 = pad(x.size(1));
  const auto largest = empty({2, 3}, x);
  C10_CUDA_CHECK(cudaMemsetAsync(floats(largest), 0, largest.numel() * sizeof(float), stream));
  const WeightMemory w1(parts, weight1, bias1, floats(largest)), w2(parts, weight2, bias2, floats(largest) + 3);
  const int64_t hidden8 = w1.view.padded_rows, output8 = w2.view.padded_rows;

  const int64_t longest = longest_piece(parts, kept), step1 = piece(input8, longest), step2 = piece(hidden8, longest);
  // With one part and in one piece z, before its bias, is written in float16: half the memory and 12 % less time. On
  // the five kinds of data `out` is as exact as it was; where all products of a sum have one sign and the bias cancels
  // them, the error was 1.6 to 5 times eager TF32's. A sum of k products of at most 2^28 does not exceed 2^15 units.
  const bool half = parts == 1 && !kept && step1 == input8;
  const float unit = half ? std::ldexp(1.f, 13 + static_cast<int>(std::ceil(std::log2(input8)))) : 1.f;

  // Memory serves twice: that of z in float16 for h's operand, and that of x's operand for the logits; where z is
  // float32, which may be wanted to the end, that of x's operand for h's.
  const int64_t slice = slice_rows(forward_elements(parts, kept), batch, std::max({input8, hidden8, output8}));
  const int64_t held = kept ? batch : slice;
  const auto product = empty({held, hidden8}, x, half ? at::kHalf : at::kFloat);
  const auto operand =
      empty({slice, half ? std::max(input8, 2 * output8) : parts * std::max(input8, hidden8)}, x, at::kHalf);
  const auto logits = half ? Tensor() : empty({held, output8}, x);
  const auto slope = kept ? empty({batch}, x) : Tensor();
  const auto facts = empty({3, slice}, x), flags = empty({2, slice}, x, at::kBool);
  const Operand split_x{halves(operand), floats(facts), floats(facts) + slice};
  const Operand split_h{halves(half ? product : operand), nullptr, floats(facts) + 2 * slice};  // its scale is 2^-15
  bool *repaired = flags.mutable_data_ptr<bool>(), *centred = repaired + slice;

  for (int64_t begin = 0; begin < batch; begin += slice) {
    const int64_t rows = std::min(slice, batch - begin), at = kept ? begin : 0;
    const Hidden hidden{half ? product.mutable_data_ptr() : floats(product) + at * hidden8,
                        half,
                        unit,
                        correction(step1),
                        rows_at(x, begin, rows),
                        split_x,
                        repaired,
                        kept ? floats(slope) + begin : nullptr,
                        w1.view};
    float* y = half ? reinterpret_cast<float*>(halves(operand)) : floats(logits) + at * output8;
    const bool first = begin == 0;
    C10_CUDA_CHECK(split(parts, first ? w1.view : Weight{}, first ? w2.view : Weight{}, hidden.x, split_x, stream));
    if (half)
      gemm({rows, hidden8, input8, input8, input8, false, true}, split_x.data, w1.view.operand.data, hidden.product,
           stream, false, 1 / unit);
    else
      gemm_along(parts, rows, hidden8, input8, step1, split_x.data, w1.view.operand.data,
                 static_cast<float*>(hidden.product), stream);
    C10_CUDA_CHECK(bias_sigmoid(parts, hidden, w2.view.largest_ratio, split_h, centred, stream));
    gemm_along(parts, rows, output8, hidden8, step2, split_h.data, w2.view.operand.data, y, stream);
    C10_CUDA_CHECK(bias_logsumexp(parts, rows, y, output8, correction(step2) * 0x1p-15f, kept ? y : nullptr, hidden,
                                  split_h.doubt, centred, w2.view, floats(out) + begin, stream));
  }
  if (kept) *kept = {product, logits, slope};
}

// A layer's product in the plain form, at the precision of PyTorch's switch (`tf32` says which): (batch, cols or padded
// cols), and the bias still to be added, or null.
//
// On an H200, at 769 products of each precision, at::mm takes on average 35 % less than eager PyTorch's addmm (TF32:
// 10 %). addmm, whose result is without pad columns, stands where mm can take far longer: up to 10 times with up to 16
// rows in float32, unless sums are long; up to 12 times with many rows of few columns, though never of a single
// one; 1.7 times with very many columns, or in large TF32 products of more than a few tiles. The bounds are from 1414
// more products of each precision.
std::pair<Tensor, const float*> linear(const Tensor& rows, const Tensor& weight, const Tensor& bias, bool tf32) {
  const int64_t batch = rows.size(0), terms = weight.size(1), cols = weight.size(0);
  const bool few_rows = !tf32 && (batch < 8 || (batch <= 12 && terms < 4096) || (batch <= 16 && terms < 2048));
  const bool few_cols = batch > 16384 && cols > 1 && cols < 64, many_cols = cols >= 16384;
  const bool many_tiles =
      tf32 && static_cast<double>(batch) * cols * terms >= 5e9 && (batch + 127) / 128 * ((cols + 127) / 128) > 32;
  if (few_rows || few_cols || many_cols || many_tiles) return {at::addmm(bias, rows, weight.t()), nullptr};
  const auto product = empty({batch, pad(cols)}, rows);
  auto result = product.narrow(1, 0, cols);
  at::mm_out(result, rows, weight.t());
  return {product, bias.const_data_ptr<float>()};
}

// cuBLAS, called as PyTorch calls it.
void plain_form(const Tensor& x, const Tensor& weight1, const Tensor& bias1, const Tensor& weight2, const Tensor& bias2,
                const Tensor& out, bool tf32, Kept* kept, cudaStream_t stream) {
  const int64_t batch = x.size(0);
  const int hidden = weight1.size(0), hidden8 = pad(hidden), output = weight2.size(0), output8 = pad(output);
  auto [z, due1] = linear(x, weight1, bias1, tf32);
  const auto h = z.size(1) == hidden8 ? z : empty({batch, hidden8}, x);
  const auto slope = kept ? empty({batch}, x) : Tensor();
  C10_CUDA_CHECK(plain_bias_sigmoid({floats(z), batch, z.stride(0), hidden, hidden8}, due1, floats(h),
                                    kept ? floats(slope) : nullptr, stream));
  z.reset();  // its memory serves again
  const auto [y, due2] = linear(h.narrow(1, 0, hidden), weight2, bias2, tf32);
  const auto logits = kept && y.size(1) != output8 ? empty({batch, output8}, x) : y;
  Weight weight{};
  weight.bias = due2, weight.rows = output, weight.padded_rows = output8;
  C10_CUDA_CHECK(bias_logsumexp(0, batch, floats(y), y.stride(0), 1.f, kept ? floats(logits) : nullptr, {}, nullptr,
                                nullptr, weight, floats(out), stream));
  if (kept) *kept = {h, logits, slope};
}

struct Gradients {
  Tensor x, weight1, bias1, weight2, bias2;
};

// Which gradients are asked for: of x, of the first layer, of the second.
struct Needs {
  bool x, first, second;
};

// The sums, or the largest of elements not below 0, of the first `size` columns of `rows` (count, ...), whose further
// dimensions count as one. at::sum takes about twice as long for a thousand columns and more. 2048 columns or fewer do
// not fill the GPU: of many rows, shares are reduced first.
Tensor reduce_columns(bool to_largest, const Tensor& rows, int64_t size, cudaStream_t stream) {
  const int64_t count = rows.size(0), most = 65535;  // CUDA's limit
  const int64_t shares = size <= 2048 && count >= 4096 ? std::min(count / 1024, most) : 1;
  const auto result = shares > 1 ? empty({shares, pad(size)}, rows) : empty({size}, rows);
  C10_CUDA_CHECK(::reduce_columns(to_largest, floats(rows), count, rows.stride(0), result.size(-1), shares,
                                  floats(result), stream));
  return shares > 1 ? reduce_columns(to_largest, result, size, stream) : result;
}

Tensor column_sums(const Tensor& rows, int64_t size, cudaStream_t stream) {
  return reduce_columns(false, rows, size, stream);
}

// What undoes the scaling of the operands that are summed over the batch: for each column of x (padded) and, last, for
// grad.
Tensor gradient_scales(RowFactors factors, const Tensor& x, cudaStream_t stream) {
  const int64_t batch = x.size(0), input8 = pad(x.size(1));
  const auto bounds = empty({strips_of(batch), input8 + 8}, x);
  C10_CUDA_CHECK(gradient_bounds(factors, rows_at(x, 0, batch), floats(bounds), stream));
  const auto scales = reduce_columns(true, bounds, input8 + 1, stream);
  C10_CUDA_CHECK(bounds_to_scales(floats(scales), input8 + 1, stream));
  return scales;
}

// A transposed weight, split, its pad rows zero; and (2, padded count): the scales of its rows, and their doubts, which
// nobody reads. Those of pad rows are not set.
std::pair<Tensor, Tensor> split_transposed(int parts, const Tensor& rows, cudaStream_t stream) {
  const int64_t count = rows.size(0), cols = rows.size(1), count8 = pad(count), cols8 = pad(cols);
  const auto operand = empty({count8, parts * cols8}, rows, at::kHalf), facts = empty({2, count8}, rows);
  if (count8 > count)
    C10_CUDA_CHECK(cudaMemsetAsync(halves(operand) + count * parts * cols8, 0,
                                   (count8 - count) * parts * cols8 * sizeof(__half), stream));
  C10_CUDA_CHECK(
      split(parts, {}, {}, rows_at(rows, 0, count), {halves(operand), floats(facts), floats(facts) + count8}, stream));
  return {operand, facts};
}

// The gradients by the same products. Weights are transposed before they are split, so that sums run along rows.
Gradients split_gradients(int parts, const Tensor& grad, const Tensor& x, const Tensor& weight1, const Tensor& weight2,
                          const Tensor& out, const Kept& kept, Needs needs, cudaStream_t stream) {
  const int64_t batch = x.size(0), input = x.size(1), hidden = weight1.size(0), output = weight2.size(0);
  const int64_t input8 = pad(input), hidden8 = pad(hidden), output8 = pad(output);
  const bool need_dz = needs.x || needs.first;
  Tensor w1, w1_facts, w2, w2_facts;
  if (need_dz) std::tie(w2, w2_facts) = split_transposed(parts, weight2.t().contiguous(), stream);
  if (needs.x) {
    auto rows = empty({input, hidden}, x);
    at::mul_out(rows, weight1.t(), w2_facts[0].narrow(0, 0, hidden));  // dz lies in units of these scales
    std::tie(w1, w1_facts) = split_transposed(parts, rows, stream);
  }
  const float *w2_scale = need_dz ? floats(w2_facts) : nullptr, *slope = kept.slope.const_data_ptr<float>();
  const bool need_scales = needs.first || needs.second;
  const auto scales = need_scales ? gradient_scales({grad.const_data_ptr<float>(), slope}, x, stream) : Tensor();
  const float *x_scale = need_scales ? floats(scales) : nullptr, *grad_scale = need_scales ? x_scale + input8 : nullptr;

  const int64_t longest = longest_piece(parts, true), step1 = piece(hidden8, longest), step2 = piece(output8, longest);
  const int64_t slice = slice_rows(backward_elements(parts), batch, std::max({input8, hidden8, output8}));
  const auto operand = [&](bool needed, int64_t segments, int64_t cols) {
    return needed ? empty({slice, segments * cols}, x, at::kHalf) : Tensor();
  };
  const auto p = operand(true, parts, output8), dz = operand(need_dz, parts, hidden8);
  const auto weighed_h = operand(needs.second, batch_segments(parts), hidden8);
  // Memory that serves three times: for dh, for x's operand (two segments of float16 at most), for dx.
  const auto in_turn = need_dz ? empty({slice, std::max(hidden8, input8)}, x) : Tensor();
  float *dh = need_dz ? floats(in_turn) : nullptr, *dx = dh;
  __half* weighed_x = need_dz ? halves(in_turn) : nullptr;
  const int64_t strips = strips_of(batch);  // a slice begins at a multiple of kStrip
  const auto sums1 = empty({strips, hidden8}, x), sums2 = empty({strips, output8}, x);
  const auto products = [&](bool needed, int64_t rows, int64_t cols) {
    return needed ? empty({partial_products(rows, cols, slice), rows, cols}, x) : Tensor();
  };
  const auto dw1 = products(needs.first, hidden8, input8), dw2 = products(needs.second, output8, hidden8);
  Gradients d;
  if (needs.x) d.x = empty({batch, input}, x);
  for (int64_t begin = 0; begin < batch; begin += slice) {
    const int64_t rows = std::min(slice, batch - begin), strip = begin / kStrip;
    const RowFactors factors{grad.const_data_ptr<float>() + begin, slope + begin};
    C10_CUDA_CHECK(softmax_gradient(parts, factors.grad, floats(kept.y) + begin * output8,
                                    out.const_data_ptr<float>() + begin, rows, output, output8, halves(p), nullptr,
                                    floats(sums2) + strip * output8, stream));
    if (need_dz) gemm_along(parts, rows, hidden8, output8, step2, halves(p), halves(w2), dh, stream);
    C10_CUDA_CHECK(sigmoid_gradient(parts, dh, floats(kept.h) + begin * hidden8, factors, rows, hidden8,
                                    correction(step2), w2_scale, grad_scale, need_dz ? halves(dz) : nullptr,
                                    needs.second ? halves(weighed_h) : nullptr, floats(sums1) + strip * hidden8,
                                    stream));
    if (needs.second) gemm_over_batch(parts, rows, halves(p), halves(weighed_h), dw2, begin == 0, stream);
    if (needs.first) {
      C10_CUDA_CHECK(weigh_rows(parts, factors, rows_at(x, begin, rows), x_scale, weighed_x, stream));
      gemm_over_batch(parts, rows, halves(dz), weighed_x, dw1, begin == 0, stream);
    }
    if (needs.x) {
      gemm_along(parts, rows, input8, hidden8, step1, halves(dz), halves(w1), dx, stream);
      C10_CUDA_CHECK(unscale(dx, rows, input, input8, correction(step1),
                             {nullptr, factors.grad, factors.slope, floats(w1_facts)}, floats(d.x) + begin * input,
                             stream));
    }
  }
  const auto sum = [&](const Tensor& dw) { return dw.size(0) > 1 ? column_sums(dw, dw.stride(0), stream) : dw; };
  if (needs.first) {
    d.weight1 = empty({hidden, input}, x), d.bias1 = column_sums(sums1, hidden, stream);
    C10_CUDA_CHECK(unscale(floats(sum(dw1)), hidden, input, input8, 1.f, {nullptr, w2_scale, nullptr, x_scale},
                           floats(d.weight1), stream));
  }
  if (needs.second) {
    d.weight2 = empty({output, hidden}, x), d.bias2 = column_sums(sums2, output, stream);
    C10_CUDA_CHECK(unscale(floats(sum(dw2)), output, hidden, hidden8, 1.f / kUpP,
                           {grad_scale, nullptr, nullptr, nullptr}, floats(d.weight2), stream));
  }
  return d;
}

Gradients plain_gradients(const Tensor& grad, const Tensor& x, const Tensor& weight1, const Tensor& weight2,
                          const Tensor& out, const Kept& kept, Needs needs, cudaStream_t stream) {
  const int64_t batch = x.size(0), hidden = weight1.size(0), output = weight2.size(0);
  const int64_t hidden8 = pad(hidden), output8 = pad(output), strips = strips_of(batch);
  const auto dy8 = empty({batch, output8}, x), sums2 = empty({strips, output8}, x);
  C10_CUDA_CHECK(softmax_gradient(0, grad.const_data_ptr<float>(), floats(kept.y), out.const_data_ptr<float>(), batch,
                                  output, output8, nullptr, floats(dy8), floats(sums2), stream));
  const auto dy = dy8.narrow(1, 0, output), h = kept.h.narrow(1, 0, hidden);
  Gradients d;
  if (needs.x || needs.first) {
    const auto dh8 = empty({batch, hidden8}, x), sums1 = empty({strips, hidden8}, x);
    auto dh = dh8.narrow(1, 0, hidden);
    at::mm_out(dh, dy, weight2);
    C10_CUDA_CHECK(sigmoid_gradient(0, floats(dh8), floats(kept.h), {}, batch, hidden8, 1.f, nullptr, nullptr, nullptr,
                                    nullptr, floats(sums1), stream));
    if (needs.x) d.x = at::mm(dh, weight1);
    if (needs.first) d.weight1 = at::mm(dh.t(), x), d.bias1 = column_sums(sums1, hidden, stream);
  }
  if (needs.second) d.weight2 = at::mm(dy.t(), h), d.bias2 = column_sums(sums2, output, stream);
  return d;
}

// ---- Operators --------------------------------------------------------------------------------------------

// On an H200, in seconds: what the split form gains by a multiplication, and by one where a row of an operand or of the
// product does not start at a multiple of 16 bytes (which TF32 minds); and what it loses (below 0: gains) by an element
// of h, of a weight, of x, of y, by a row of one of them, by a call, and by a term of a sum while multiprocessors idle.
struct Costs {
  double product, misaligned_product, hidden, weight, input, output, row, call, idle_term;
};

// Without and with gradients. Fit to the times of both forms at 585 and 567 sizes, many of them random (batch 2 to
// 300000, widths 1 to 1000000). In training the aim was the mean of two times of a step: the GPU's, and the longer of
// it and the host's (0.45 ms, split 0.50). What is chosen takes the GPU on average 1 % longer than the better form,
// also at 128 further random sizes of training, which nothing was fit to.
constexpr Costs kFloat32[] = {{3.4e-14, 3.4e-14, 0, 2.2e-12, 1.5e-12, 1.5e-12, 7.5e-10, 7e-8, 7.9e-9},
                              {8.8e-14, 8.8e-14, 1e-11, 1.3e-11, 7.8e-12, 2.1e-12, 0, 3.9e-5, 1.1e-8}};
constexpr Costs kTf32[] = {{2.2e-15, 1.5e-14, -2.7e-12, 1.6e-12, 2.1e-12, 2.1e-12, 1.9e-10, 0, 4.1e-9},
                           {1.1e-14, 4.8e-14, 3.4e-13, 7.8e-12, 5e-12, -2.1e-12, 0, 4.3e-5, 4.7e-9}};

// Whether the split form is the quicker one. GPUs with less float16 for their float32 than those named go plain.
bool splits(const Tensor& x, const Tensor& weight1, const Tensor& weight2, bool tf32, bool for_gradients,
            std::optional<bool> asked) {
  const auto* gpu = at::cuda::getCurrentDeviceProperties();
  const bool pays = gpu->major == 9 || gpu->major == 10 || (gpu->major == 8 && gpu->minor == 0);
  const double batch = x.size(0), input = x.size(1), hidden = weight1.size(0), output = weight2.size(0);
  const Costs& s = (tf32 ? kTf32 : kFloat32)[for_gradients];
  const bool aligned = weight1.size(0) % 4 == 0;
  const bool aligned1 = aligned && x.size(1) % 4 == 0, aligned2 = aligned && weight2.size(0) % 4 == 0;
  const double gained = batch * hidden * input * (aligned1 ? s.product : s.misaligned_product) +
                        batch * hidden * output * (aligned2 ? s.product : s.misaligned_product);
  // A product of fewer tiles of 128 x 128 than multiprocessors takes as long as its sums are, in every slice anew.
  const auto idle = [&](int64_t elements, double terms, double cols) {
    const double slice = slice_rows(elements, batch, std::max({input, hidden, output}));
    const double tiles = std::ceil(slice / 128) * std::ceil(cols / 128);
    return std::ceil(batch / slice) * terms * std::max(0., 1 - tiles / gpu->multiProcessorCount);
  };
  const int parts = tf32 ? 1 : 3;
  const int64_t elements = forward_elements(parts, for_gradients);
  const double backward = for_gradients ? idle(backward_elements(parts), output, hidden) : 0;
  const double idle_terms = idle(elements, input, hidden) + idle(elements, hidden, output) + backward;
  const double lost = batch * hidden * s.hidden + hidden * (input + output) * s.weight +
                      batch * (input * s.input + output * s.output) + (batch + hidden + output) * s.row + s.call +
                      idle_terms * s.idle_term;
  return asked.value_or(pays && gained > lost);
}

void check(const Tensor& t, const char* name, const Tensor& x, std::initializer_list<int64_t> sizes) {
  TORCH_CHECK(t.is_cuda() && t.device() == x.device() && t.scalar_type() == at::kFloat, name,
              " must be float32 on the GPU of x (", x.device(), "), but it is ", t.scalar_type(), " on ", t.device());
  TORCH_CHECK(t.sizes() == at::IntArrayRef(sizes), name, " must be of shape ", at::IntArrayRef(sizes),
              ", but it is of ", t.sizes());
  TORCH_CHECK(t.numel() > 0, name, " must not be empty, but it is of shape ", t.sizes());
}

// Columns are counted in int, by threads that may look up to 16384 beyond a row's end.
void check_widths(int64_t input, int64_t hidden, int64_t output) {
  TORCH_CHECK(std::max({input, hidden, output}) < INT_MAX - 32768, "input, hidden and output must be below ",
              INT_MAX - 32768, ", but they are ", input, ", ", hidden, " and ", output);
}

// Rows that are contiguous in memory, however far apart.
Tensor rows_of(const Tensor& t) { return t.stride(1) == 1 || t.size(1) == 1 ? t : t.contiguous(); }

// What was kept, as it was made: hooks on saved tensors may bring back other layouts, at any address.
Tensor restored(const Tensor& t) {
  const auto rows = t.contiguous();
  return reinterpret_cast<uintptr_t>(rows.const_data_ptr()) % 16 == 0 ? rows : rows.clone();
}

std::pair<Tensor, Kept> run(const Tensor& x, const Tensor& weight1, const Tensor& bias1, const Tensor& weight2,
                            const Tensor& bias2, bool tf32, std::optional<bool> split, bool keep) {
  TORCH_CHECK(x.dim() == 2 && bias1.dim() == 1 && bias2.dim() == 1,
              "x must have two dimensions and the biases one, got ", x.dim(), ", ", bias1.dim(), " and ", bias2.dim());
  check(x, "x", x, {x.size(0), x.size(1)});
  check(weight1, "weight1", x, {bias1.size(0), x.size(1)});
  check(bias1, "bias1", x, {bias1.size(0)});
  check(weight2, "weight2", x, {bias2.size(0), bias1.size(0)});
  check(bias2, "bias2", x, {bias2.size(0)});
  check_widths(x.size(1), bias1.size(0), bias2.size(0));
  const c10::cuda::CUDAGuard guard(x.device());
  const auto stream = c10::cuda::getCurrentCUDAStream().stream();
  const auto out = empty({x.size(0)}, x);
  const auto rows = rows_of(x), w1 = weight1.contiguous(), b1 = bias1.contiguous(), w2 = weight2.contiguous();
  const auto b2 = bias2.contiguous();
  Kept kept;
  if (splits(x, w1, w2, tf32, keep, split))
    split_form(tf32 ? 1 : 3, rows, w1, b1, w2, b2, out, keep ? &kept : nullptr, stream);
  else plain_form(rows, w1, b1, w2, b2, out, tf32, keep ? &kept : nullptr, stream);
  return {out, kept};
}

Tensor forward(const Tensor& x, const Tensor& weight1, const Tensor& bias1, const Tensor& weight2, const Tensor& bias2,
               bool tf32, std::optional<bool> split) {
  return run(x, weight1, bias1, weight2, bias2, tf32, split, false).first;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> forward_keeping(const Tensor& x, const Tensor& weight1, const Tensor& bias1,
                                                           const Tensor& weight2, const Tensor& bias2, bool tf32,
                                                           std::optional<bool> split) {
  const auto [out, kept] = run(x, weight1, bias1, weight2, bias2, tf32, split, true);
  return {out, kept.h, kept.y, kept.slope};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gradients(const Tensor& grad, const Tensor& x, const Tensor& weight1,
                                                             const Tensor& weight2, const Tensor& out, const Tensor& h,
                                                             const Tensor& y, const Tensor& slope, bool tf32,
                                                             bool need_x, bool need_first, bool need_second,
                                                             std::optional<bool> split) {
  TORCH_CHECK(x.dim() == 2 && weight1.dim() == 2 && weight2.dim() == 2,
              "x and the weights must have two dimensions, got ", x.dim(), ", ", weight1.dim(), " and ", weight2.dim());
  const int64_t batch = x.size(0), hidden = weight1.size(0), output = weight2.size(0);
  check(x, "x", x, {batch, x.size(1)});
  check(weight1, "weight1", x, {hidden, x.size(1)});
  check(weight2, "weight2", x, {output, hidden});
  check(grad, "grad", x, {batch});
  check(out, "out", x, {batch});
  check(h, "h", x, {batch, pad(hidden)});
  check(y, "y", x, {batch, pad(output)});
  check(slope, "slope", x, {batch});
  check_widths(x.size(1), hidden, output);
  const c10::cuda::CUDAGuard guard(x.device());
  const auto stream = c10::cuda::getCurrentCUDAStream().stream();
  const Kept kept{restored(h), restored(y), restored(slope)};
  const auto g = grad.contiguous(), rows = rows_of(x), w1 = weight1.contiguous(), w2 = weight2.contiguous();
  const Needs needs{need_x, need_first, need_second};
  const auto d = splits(x, w1, w2, tf32, true, split)
                     ? split_gradients(tf32 ? 1 : 3, g, rows, w1, w2, out.contiguous(), kept, needs, stream)
                     : plain_gradients(g, rows, w1, w2, out.contiguous(), kept, needs, stream);
  const auto or_nothing = [&](const Tensor& t) { return t.defined() ? t : empty({0}, x); };
  return {or_nothing(d.x), or_nothing(d.weight1), or_nothing(d.bias1), or_nothing(d.weight2), or_nothing(d.bias2)};
}

// The same operators on tensors without data, for torch.compile: the shapes of the results.
c10::SymInt pad(const c10::SymInt& n) { return (n + 7) / 8 * 8; }

Tensor forward_shape(const Tensor& x, const Tensor&, const Tensor&, const Tensor&, const Tensor&, bool,
                     std::optional<bool>) {
  return at::empty_symint({x.sym_size(0)}, x.options());
}

std::tuple<Tensor, Tensor, Tensor, Tensor> forward_keeping_shape(const Tensor& x, const Tensor&, const Tensor& bias1,
                                                                 const Tensor&, const Tensor& bias2, bool,
                                                                 std::optional<bool>) {
  const auto batch = x.sym_size(0);
  return {at::empty_symint({batch}, x.options()), at::empty_symint({batch, pad(bias1.sym_size(0))}, x.options()),
          at::empty_symint({batch, pad(bias2.sym_size(0))}, x.options()), at::empty_symint({batch}, x.options())};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gradients_shape(const Tensor&, const Tensor& x,
                                                                   const Tensor& weight1, const Tensor& weight2,
                                                                   const Tensor&, const Tensor&, const Tensor&,
                                                                   const Tensor&, bool, bool need_x, bool need_first,
                                                                   bool need_second, std::optional<bool>) {
  const auto like = [&](bool needed, c10::SymIntArrayRef sizes) {
    return needed ? at::empty_symint(sizes, x.options()) : empty({0}, x);
  };
  const auto hidden = weight1.sym_size(0), output = weight2.sym_size(0);
  return {like(need_x, x.sym_sizes()), like(need_first, weight1.sym_sizes()), like(need_first, {hidden}),
          like(need_second, weight2.sym_sizes()), like(need_second, {output})};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(EXTENSION_NAMESPACE, m) {
  m.def(
      "forward(Tensor x, Tensor weight1, Tensor bias1, Tensor weight2, Tensor bias2, bool tf32, bool? split=None) -> "
      "Tensor");
  m.def(
      "forward_keeping(Tensor x, Tensor weight1, Tensor bias1, Tensor weight2, Tensor bias2, bool tf32, "
      "bool? split=None) -> (Tensor out, Tensor h, Tensor y, Tensor slope)");
  m.def(
      "gradients(Tensor grad, Tensor x, Tensor weight1, Tensor weight2, Tensor out, Tensor h, Tensor y, Tensor "
      "slope, bool tf32, bool need_x, bool need_first, bool need_second, bool? split=None) -> "
      "(Tensor x, Tensor weight1, Tensor bias1, Tensor weight2, Tensor bias2)");
}
TORCH_LIBRARY_IMPL(EXTENSION_NAMESPACE, CUDA, m) {
  m.impl("forward", forward);
  m.impl("forward_keeping", forward_keeping);
  m.impl("gradients", gradients);
}
TORCH_LIBRARY_IMPL(EXTENSION_NAMESPACE, Meta, m) {
  m.impl("forward", forward_shape);
  m.impl("forward_keeping", forward_keeping_shape);
  m.impl("gradients", gradients_shape);
}
"""
)

CXX_FLAGS = ["-O1"]
NVCC_FLAGS = ["-O3"]

# --- build block: the same text in every solution of this project (tests/test_build.py compares them) ---

# nvcc's package asks for nvvm and crt of any version; their extras pin them to its own, without which ptxas fails.
_TOOLKIT = f'pip install "cuda-toolkit[nvcc,nvvm,crt,cccl]=={torch.version.cuda}.*"'


# A compiler that brings its C++ library as an archive must not mix that with PyTorch's: a number in a message crashed.
_LINK_FLAGS = ["-Wl,--exclude-libs,ALL"]


class _Explain(contextlib.AbstractContextManager):
    """Turns an error raised inside into one RuntimeError: what failed, the cause in its own words, and what to do."""

    def __init__(self, what, advice):
        self.what, self.advice = what, advice

    def __exit__(self, kind, error, trace):
        if not isinstance(error, Exception):
            return
        # A failed build carries all that ninja printed: "FAILED: target", the command, then what the compiler printed.
        _, failed, output = str(error).partition("FAILED: ")
        output = re.split(r"\n\[\d+/|\nninja: ", output)[0].split("\n", 2)[-1] if failed else str(error)
        lines = [line.strip() for line in output.splitlines() if line.strip()] or [kind.__name__]
        cause = next((line for line in lines if re.search("error|fatal", line, re.IGNORECASE)), lines[0])
        more = lines[:20] if len(lines) > 1 else []
        raise RuntimeError("\n".join([f"{self.what}: {cause.rstrip('.')}. {self.advice}.", *more])) from None


@functools.cache
def _architectures():
    """nvcc's flags for TORCH_CUDA_ARCH_LIST or, where it is unset, for the GPUs that are visible."""
    from torch.utils import cpp_extension

    if torch.version.cuda is None or sys.platform != "linux":
        raise RuntimeError(
            f"{EXTENSION} needs PyTorch for CUDA on Linux, this is PyTorch {torch.__version__} on {sys.platform}: "
            "keep the tensors on the CPU, or install such a PyTorch from https://pytorch.org."
        )
    if os.environ.get("TORCH_CUDA_ARCH_LIST", "native") in ("", "native") and torch.cuda.device_count() == 0:
        raise RuntimeError(
            f"{EXTENSION} cannot tell what to compile for, as no GPU is visible: name the compute capability, "
            "e.g. export TORCH_CUDA_ARCH_LIST=9.0 for an H100 or H200."
        )
    with _Explain(
        "TORCH_CUDA_ARCH_LIST cannot be used", "Unset it to compile for the visible GPUs, or set it like 9.0"
    ):
        return tuple(cpp_extension._get_cuda_arch_flags())


def _runs_on(capability):
    """Whether what is compiled, machine code or PTX, runs on a GPU of this compute capability (major, minor)."""
    for kind, number, only in re.findall(r"code=(sm|compute)_(\d+)([a-z]?)", " ".join(_architectures())):
        built = divmod(int(number), 10)
        newer = built < capability and (kind == "compute" or built[0] == capability[0])
        if built == capability or (newer and not only):
            return True
    return False


_PIP_HEADERS = ("*/include", "*/include/cccl")  # in the folders below


def _pip_folders():
    """The site-packages/nvidia folders: CUDA's libraries, headers and, with cuda-toolkit[nvcc], its compiler."""
    found = importlib.util.find_spec("nvidia")
    return list(found.submodule_search_locations or ()) if found else []


def _find_nvcc():
    """The path of nvcc, of PyTorch's CUDA major version.

    The first such of: CUDA_HOME, CUDA_PATH (where set, nothing else is tried), PATH, /usr/local/cuda, the pip packages.
    """
    cuda, major = torch.version.cuda, torch.version.cuda.split(".")[0]
    advice = f"Set CUDA_HOME to a CUDA {major} toolkit"
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    packaged = [path for folder in _pip_folders() for path in glob.glob(f"{glob.escape(folder)}/*/bin/nvcc")]
    places = [f"{home}/bin/nvcc"] if home else [shutil.which("nvcc"), "/usr/local/cuda/bin/nvcc", *packaged]
    other = []
    # Each once: PATH's may be that of /usr/local/cuda.
    for nvcc in dict.fromkeys(os.path.abspath(place) for place in places if place and os.access(place, os.X_OK)):
        with _Explain(f"{nvcc} does not work", advice):
            command = [nvcc, "--version"]
            run = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, errors="replace")
            release = re.search(r"release (\d+)\.\d+", run.stdout)
            if not release:
                raise RuntimeError(run.stdout)
        if release[1] == major:
            return nvcc
        other.append(f"{nvcc} is {release[0]}")
    if not home:  # which would keep the pip packages from being seen
        advice += f", or: {_TOOLKIT}"
    if other:
        raise RuntimeError(f"{', '.join(other)}, but PyTorch {torch.__version__} is of CUDA {cuda}. {advice}.")
    where = f"at {places[0]}" if home else "on PATH, in /usr/local/cuda/bin or among the pip packages"
    raise RuntimeError(f"{EXTENSION} needs the CUDA compiler, nvcc, and there is none {where}. {advice}.")


def _find_ninja():
    """The path of ninja, on PATH or in the ninja package; also sees to it that there is a host compiler."""
    for tool in (os.environ.get("CXX", "c++"), os.environ.get("CC", "g++")):
        if not shutil.which(tool):
            raise RuntimeError(f"{EXTENSION} needs a C++ compiler, and {tool} is not on PATH: apt-get install g++")
    package = importlib.util.find_spec("ninja")
    ninja = shutil.which("ninja") or (package and shutil.which("ninja", path=importlib.import_module("ninja").BIN_DIR))
    if not ninja:
        raise RuntimeError(f"{EXTENSION} is built by ninja, which is not on PATH: pip install ninja")
    return ninja


def _writable(folder, mode=0o777):
    with contextlib.suppress(OSError):
        os.makedirs(folder, mode, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return True
    return False


def _cache(name):
    """The folder of all builds: TORCH_EXTENSIONS_DIR, else PyTorch's default, else one of this user's own."""
    from torch.utils import cpp_extension

    chosen = os.environ.get("TORCH_EXTENSIONS_DIR")
    folder = os.path.abspath(chosen or cpp_extension.get_default_build_root())
    homeless = not chosen and "~" in folder.split(os.sep)  # no HOME: PyTorch means a folder of that name
    if os.path.exists(f"{folder}/{name}/{name}.so") or (not homeless and _writable(folder)):
        return folder
    own = os.path.join(tempfile.gettempdir(), f"torch_extensions_{os.getuid()}")
    if not chosen and _writable(own, 0o700):
        found = os.lstat(own)  # /tmp is everyone's: what another user can write must not be loaded
        if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022:
            return own
    raise RuntimeError(
        f"{EXTENSION} cannot write its library to {folder}{'' if chosen else ' or ' + own}: "
        "export TORCH_EXTENSIONS_DIR=a folder that you can write."
    )


@contextlib.contextmanager
def _lock(path):
    """Holds the file `path` locked; the kernel ends that when the holder dies, however it dies."""
    import fcntl

    with open(path, "a") as file:
        for attempt in itertools.count():
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            if attempt == 25:
                print(f"{EXTENSION}: waiting for a build that holds the lock {path}", file=sys.stderr, flush=True)
            time.sleep(0.2)
        yield


def _compile(name, library, nvcc, ninja):
    """Compiles, loads, and moves the library to its place when it is whole.

    The paths that PyTorch writes into its build file lead through links in a folder with a plain name, so that spaces
    and non-ASCII letters in the real ones do no harm.
    """
    from torch.utils import cpp_extension

    folder = os.path.dirname(library)
    os.makedirs(folder, exist_ok=True)
    for left in glob.glob(f"{glob.escape(folder)}/build-*"):  # by builds that were killed
        shutil.rmtree(left, ignore_errors=True)
    dry = subprocess.run([nvcc, "--dryrun", "-x", "cu", "/dev/null"], stderr=subprocess.PIPE, errors="replace")
    include = re.search(r'INCLUDES="-I(.*?)"', dry.stderr)  # nvcc may be a script, or a link, anywhere
    with (
        contextlib.ExitStack() as undo,
        tempfile.TemporaryDirectory(dir="/tmp" if os.access("/tmp", os.W_OK) else None) as links,
        tempfile.TemporaryDirectory(prefix="build-", dir=folder) as build,
    ):
        os.makedirs(f"{links}/cuda/lib64")
        os.symlink(build, f"{links}/build")
        os.symlink(os.path.dirname(nvcc), f"{links}/cuda/bin")
        os.symlink(include[1] if include else f"{os.path.dirname(nvcc)}/../include", f"{links}/cuda/include")
        os.symlink(f"{torch.__path__[0]}/lib", f"{links}/torch")
        # PyTorch links with -lcudart, a name that the pip packages lack. Nothing need be linked: libc10_cuda brings it.
        with open(f"{links}/cuda/lib64/libcudart.so", "w") as script:
            script.write("/* an empty linker script */\n")
        headers = []  # The pip packages' complete a toolkit that lacks cuBLAS's or others; they are searched last.
        for number, packages in enumerate(_pip_folders()):
            os.symlink(packages, f"{links}/pip{number}")
            for pattern in _PIP_HEADERS:
                headers += [f"-idirafter,{path}" for path in glob.glob(f"{links}/pip{number}/{pattern}")]
        for attribute, value in (("CUDA_HOME", f"{links}/cuda"), ("TORCH_LIB_PATH", f"{links}/torch")):
            undo.callback(setattr, cpp_extension, attribute, getattr(cpp_extension, attribute))
            setattr(cpp_extension, attribute, value)
        if not shutil.which("ninja"):
            undo.callback(os.environ.__setitem__, "PATH", os.environ["PATH"])
            os.environ["PATH"] += os.pathsep + os.path.dirname(ninja)
        define = f"-DEXTENSION_NAMESPACE={name}"
        cpp_extension.load_inline(
            name=name,
            cpp_sources=CPP_SOURCE,
            cuda_sources=CUDA_SOURCE,
            extra_cflags=[define, *CXX_FLAGS, *(flag.replace(",", " ", 1) for flag in headers)],
            extra_cuda_cflags=[define, *NVCC_FLAGS, *_architectures(), *(f"-Xcompiler {flag}" for flag in headers)],
            extra_ldflags=[*_LINK_FLAGS],  # PyTorch adds to it
            build_directory=f"{links}/build",
            is_python_module=False,
            no_implicit_headers=True,
        )
        os.replace(glob.glob(f"{glob.escape(build)}/*.so")[0], library)


def build():
    """Compiles the extension, unless that was done before, and loads it; returns the name of its operators' namespace.

    Needs no GPU where TORCH_CUDA_ARCH_LIST says what to compile for. The name carries a digest of all that decides the
    content, so that no version is ever taken for another, on disk or in this process.
    Raises RuntimeError, whose first line says what is wrong and what to do.
    """
    flags = CXX_FLAGS, NVCC_FLAGS, _architectures(), _LINK_FLAGS
    content = CPP_SOURCE, CUDA_SOURCE, flags, torch.version.cuda, torch.__version__, platform.machine()
    name = f"{EXTENSION}_{hashlib.sha256(repr(content).encode()).hexdigest()[:16]}"
    loaded = lambda: any(name in path for path in tuple(torch.ops.loaded_libraries))
    if loaded():  # by an earlier run of this text
        return name
    cache = _cache(name)
    library = f"{cache}/{name}/{name}.so"
    if not os.path.exists(library):
        nvcc, ninja = _find_nvcc(), _find_ninja()
        if shutil.disk_usage(cache).free < 64 << 20:
            raise RuntimeError(
                f"{EXTENSION} needs 64 MiB in {cache}: make room, or export TORCH_EXTENSIONS_DIR=elsewhere"
            )
        print(f"{EXTENSION}: compiling for CUDA, once, into {cache}/{name}", file=sys.stderr, flush=True)
        advice = (
            f"CUDA_HOME, CC and CXX choose other compilers than {nvcc} and g++, "
            f"TORCH_CUDA_ARCH_LIST other architectures; for a missing header: {_TOOLKIT}"
        )
        # One lock for all builds of this project, since they set variables of PyTorch's for a while.
        with _Explain(f"{EXTENSION} could not be built", advice), _lock(f"{cache}/build.flock"):
            if not os.path.exists(library):
                _compile(name, library, nvcc, ninja)
    if not loaded():
        with _Explain(f"{library} cannot be loaded", "Remove it to have it built anew"):
            torch.ops.load_library(library)
    return name


_namespaces = {}  # CUDA device index -> the namespace whose operators run there


@torch.compiler.assume_constant_result  # torch.compile runs this at trace time; it can take a string from it
def _namespace(device):
    if device not in _namespaces:
        major, minor = torch.cuda.get_device_capability(device)
        if not _runs_on((major, minor)):
            raise RuntimeError(
                f"TORCH_CUDA_ARCH_LIST={os.environ.get('TORCH_CUDA_ARCH_LIST')} leaves out GPU {device} "
                f"({torch.cuda.get_device_name(device)}): unset it, or add {major}.{minor}."
            )
        _namespaces[device] = build()
    return _namespaces[device]


def extension(device):
    """The operators, `torch.ops.<namespace>`, built on first use, for the CUDA device of this index."""
    return getattr(torch.ops, _namespace(device))


# --- end of the build block ---


# Read while tracing, too: torch.compile guards on the switch, and compiles anew when it changes.
@torch.compiler.assume_constant_result
def _tf32():
    """Whether PyTorch's switch lets float32 matrix products round their operands to 11 bits."""
    return torch.backends.cuda.matmul.fp32_precision == "tf32"


def _gradients(grad, x, weight1, bias1, weight2, bias2):
    """The gradients of ``ModelNew`` by PyTorch's own ops, which autograd can differentiate again, to any order.

    ``grad`` (batch) -> those of ``x`` (batch, input), ``weight1`` (hidden, input), ``bias1`` (hidden),
    ``weight2`` (output, hidden), ``bias2`` (output).
    """
    h = torch.sigmoid(nn.functional.linear(x, weight1, bias1))  # (batch, hidden)
    y = nn.functional.linear(h, weight2, bias2)  # (batch, output)
    dy = grad[:, None] * (y - torch.logsumexp(y, dim=1, keepdim=True)).exp()  # (batch, output)
    dz = (dy @ weight2) * h * (1 - h)  # (batch, hidden)
    return dz @ weight1, dz.t() @ x, dz.sum(0), dy.t() @ h, dy.sum(0)


class _Fused(torch.autograd.Function):
    """The fused operator with its gradients: -> out (batch).

    Forward and backward each read PyTorch's precision switch when they run, as its own products do (torch.compile: when
    they are traced).

    All five arguments are saved, for create_graph=True: one that is changed in place between forward and backward is an
    error, also where the reference would not have needed it again (biases, say).
    """

    @staticmethod
    def forward(ctx, x, weight1, bias1, weight2, bias2):  # for setup_context PyTorch looks at signatures, 20 us a call
        arguments = x, weight1, bias1, weight2, bias2
        results = extension(x.device.index).forward_keeping.default(*arguments, _tf32())
        ctx.save_for_backward(*arguments, *results)
        ctx.set_materialize_grads(False)  # no gradient stays none, as through PyTorch's ops
        return results[0]

    @staticmethod
    def backward(ctx, grad):
        x, weight1, bias1, weight2, bias2, out, h, y, slope = ctx.saved_tensors
        needs = ctx.needs_input_grad
        if grad is None:
            return (None,) * 5
        if torch.is_grad_enabled():  # create_graph=True: somebody will differentiate this
            found = _gradients(grad, x, weight1, bias1, weight2, bias2)
        else:
            first, second = needs[1] or needs[2], needs[3] or needs[4]
            operator = extension(x.device.index).gradients.default
            found = operator(grad, x, weight1, weight2, out, h, y, slope, _tf32(), needs[0], first, second)
        return tuple(g if needed else None for g, needed in zip(found, needs, strict=True))


_LINEAR = nn.functional.linear, nn.modules.linear.Linear.forward, nn.Module.__call__, nn.Module._call_impl
_FUNCTIONS = torch.sigmoid, torch.logsumexp
# Whether these are PyTorch's. What somebody has replaced before this file was loaded keeps the fused operators off.
_UNPATCHED = nn.functional.linear is torch._C._nn.linear and all(
    getattr(method, "__globals__", None) is vars(home)
    for method, home in (
        (nn.modules.linear.Linear.forward, nn.modules.linear),
        (nn.Module.__call__, nn.modules.module),
        (nn.Module._call_impl, nn.modules.module),
    )
)


def _is_plain(linear):
    """Whether calling this submodule is ``nn.functional.linear`` of its ``weight`` and ``bias``, and nothing else.

    No hooks, no ``forward``, ``__call__`` or ``_call_impl`` of its own, not compiled by itself, not parametrized.
    """
    kind = type(linear)  # isinstance would believe a proxy
    if not (_UNPATCHED and issubclass(kind, nn.Module)):
        return False
    if (nn.functional.linear, getattr(kind, "forward", None), kind.__call__, kind._call_impl) != _LINEAR:
        return False
    hooked = linear._forward_hooks or linear._forward_pre_hooks or linear._backward_hooks or linear._backward_pre_hooks
    return not (
        hooked
        or nn.modules.module._has_any_global_hook()
        or linear.forward is None  # read so that torch.compile sees it replaced later, which it does not by `vars`
        or "forward" in vars(linear)
        or "_call_impl" in vars(linear)
        or linear._compiled_call_impl is not None
        or hasattr(kind, "weight")  # a property, which computes it
        or hasattr(kind, "bias")
    )


_PLAIN = torch.Tensor, nn.Parameter  # others have a way of their own with shapes, dtypes and devices


def _is_watched():
    """Whether PyTorch's own ops are wanted: by a mode, transform or patch of them, or by torch.jit.trace or export."""
    return (
        torch._C._are_functorch_transforms_active()  # they want a setup_context, which `_Fused` lacks
        or torch.autograd.forward_ad._current_level >= 0  # tangents, which the operator does not have
        or any(type(mode) is not DeviceContext for mode in torch.overrides._get_current_function_mode_stack())
        or (torch.sigmoid, torch.logsumexp) != _FUNCTIONS
        or torch.jit.is_tracing()
        or torch.compiler._is_exporting_flag  # is_exporting() is true under torch.compile of PyTorch 2.11
    )


def _fused_arguments(x, linear1, linear2):
    """What the fused operator takes, where it gives what calling the two submodules would; else None."""
    if not (_is_plain(linear1) and _is_plain(linear2)) or torch.is_autocast_enabled("cuda") or _is_watched():
        return None
    x, weight1, bias1, weight2, bias2 = found = x, linear1.weight, linear1.bias, linear2.weight, linear2.bias
    for t in found:
        if type(t) not in _PLAIN or t.is_nested:  # none at all, or a sharded one, say
            return None
        if not t.is_cuda or t.device != x.device or t.dtype is not torch.float32 or t.layout is not torch.strided:
            return None
    if x.dim() != 2 or bias1.dim() != 1 or bias2.dim() != 1:
        return None
    (batch, features), hidden, outputs = x.shape, bias1.shape[0], bias2.shape[0]
    fits = weight1.shape == (hidden, features) and weight2.shape == (outputs, hidden)
    return found if fits and 0 not in (batch, features, hidden, outputs) else None


def _misfit(x, linear):
    """What is wrong with an ``x`` that this submodule refused, in words that name both, or None."""
    if not (type(x) in _PLAIN and _is_plain(linear) and type(linear.weight) in _PLAIN) or x.is_nested:
        return None
    weight = linear.weight
    if x.device != weight.device:
        return f"x must be on {weight.device}, where linear1.weight is, but it is on {x.device}: move one"
    if x.dtype != weight.dtype and not x.is_meta and not torch.is_autocast_enabled(x.device.type):
        return (
            f"x must be {weight.dtype}, as linear1.weight is, but it is {x.dtype}: "
            "mat1 and mat2 must have the same dtype, so cast one"
        )
    if x.dim() >= 2 and weight.dim() == 2 and x.shape[-1] != weight.shape[1]:
        rows, (hidden, features) = x.shape[:-1].numel(), weight.shape
        return (
            f"x must have {features} features, as linear1.weight has, but its shape is {tuple(x.shape)}: "
            f"mat1 and mat2 shapes cannot be multiplied ({rows}x{x.shape[-1]} and {features}x{hidden})"
        )
    return None


class _Clarify(contextlib.AbstractContextManager):
    """Puts the RuntimeError by which this submodule refuses ``x`` into words that name both."""

    def __init__(self, x, linear):
        self.x, self.linear = x, linear

    def __exit__(self, kind, error, trace):
        misfit = _misfit(self.x, self.linear) if isinstance(error, RuntimeError) else None
        if misfit:
            raise RuntimeError(misfit) from None


class ModelNew(nn.Module):
    """``out[i] = log(sum_j exp(y[i, j]))`` with ``y = sigmoid(x @ W1.T + b1) @ W2.T + b2``; parameters as ``Model``'s.

    ``linear1`` and ``linear2`` are ``nn.Linear``, created in the reference's order: the same seed gives the same
    parameters, and a ``state_dict`` moves both ways.
    """

    def __init__(self, input_size, hidden_size, output_size):
        super().__init__()
        self.linear1 = nn.Linear(input_size, hidden_size)
        self.linear2 = nn.Linear(hidden_size, output_size)

    def forward(self, x):
        """``x`` (batch, input) -> (batch), of the parameters' dtype and device.

        float32 tensors on a GPU take the fused operator, at the precision of PyTorch's switch
        (``torch.backends.cuda.matmul.fp32_precision``); everything else takes the submodules, as the reference does.
        Raises what the reference raises; where ``linear1`` refuses the shape, dtype or device of ``x``, which is before
        any launch, a RuntimeError in words that name both.
        """
        arguments = _fused_arguments(x, getattr(self, "linear1", None), getattr(self, "linear2", None))
        if arguments is None:
            with contextlib.nullcontext() if torch.compiler.is_compiling() else _Clarify(x, self.linear1):
                hidden = torch.sigmoid(self.linear1(x))
            return torch.logsumexp(self.linear2(hidden), dim=1)
        # Inside inference_mode no graph is kept, whatever enable_grad says. torch.compile cannot trace the question.
        inference = not torch.compiler.is_compiling() and torch.is_inference_mode_enabled()
        if torch.is_grad_enabled() and not inference and any(t.requires_grad for t in arguments):
            return _Fused.apply(*arguments)
        return extension(x.device.index).forward.default(*arguments, _tf32())
