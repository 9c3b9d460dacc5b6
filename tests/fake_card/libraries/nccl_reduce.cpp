// Copyright (c) 2026 The nemo_rl_moe authors.
// SPDX-License-Identifier: Apache-2.0
// Types of elements, and what is computed of them: half types in float32, as NCCL does.
#include <cstring>

#include "nccl.h"

namespace fake_nccl {
namespace {

float from_half(uint16_t bits) {
  _Float16 value;
  memcpy(&value, &bits, 2);
  return value;
}
uint16_t to_half(float value) {
  _Float16 rounded = value;
  uint16_t bits;
  memcpy(&bits, &rounded, 2);
  return bits;
}
float from_bfloat16(uint16_t upper) {
  uint32_t bits = uint32_t(upper) << 16;
  float value;
  memcpy(&value, &bits, 4);
  return value;
}
uint16_t to_bfloat16(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fc0;  // not a number
  return (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}
template <class T>
T same(T value) {
  return value;
}

template <class A>
A joined(A a, A b, int reduction) {
  switch (reduction) {
    case PRODUCT: return a * b;
    case MAX: return a > b ? a : b;
    case MIN: return a < b ? a : b;
    default: return a + b;
  }
}

// Elements are kept as T and computed as A.
template <class T, class A>
void reduce_as(void *to, const std::vector<const char *> &inputs, size_t count, int reduction, A (*load)(T),
               T (*store)(A)) {
  T *result = static_cast<T *>(to);
  for (size_t i = 0; i < count; ++i) {
    A value = load(reinterpret_cast<const T *>(inputs[0])[i]);
    for (size_t r = 1; r < inputs.size(); ++r)
      value = joined<A>(value, load(reinterpret_cast<const T *>(inputs[r])[i]), reduction);
    if (reduction == AVERAGE) value = value / A(inputs.size());
    result[i] = store(value);
  }
}
template <class T>
void reduce_plain(void *to, const std::vector<const char *> &inputs, size_t count, int reduction) {
  reduce_as<T, T>(to, inputs, count, reduction, same<T>, same<T>);
}

template <class T, class A>
void scale_as(char *to, const void *from, size_t count, double factor, A (*load)(T), T (*store)(A)) {
  for (size_t i = 0; i < count; ++i)
    reinterpret_cast<T *>(to)[i] = store(load(static_cast<const T *>(from)[i]) * A(factor));
}

}  // namespace

size_t size_of(int type) {
  static const size_t sizes[TYPES] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
  return type >= 0 && type < TYPES ? sizes[type] : 1;
}
const char *type_name(int type) {
  static const char *names[TYPES] = {"int8",    "uint8",   "int32",   "uint32",   "int64",    "uint64",
                                     "float16", "float32", "float64", "bfloat16", "fp8_e4m3", "fp8_e5m2"};
  return type >= 0 && type < TYPES ? names[type] : "an unknown type";
}
const char *reduction_name(int reduction) {
  static const char *names[SCALED_SUMS] = {"sum", "product", "max", "min", "average"};
  return reduction >= 0 && reduction < SCALED_SUMS ? names[reduction] : "scaled sum";
}

void reduce(void *to, const std::vector<const char *> &in, size_t count, int type, int reduction) {
  switch (type) {
    case INT8: return reduce_plain<int8_t>(to, in, count, reduction);
    case UINT8: return reduce_plain<uint8_t>(to, in, count, reduction);
    case INT32: return reduce_plain<int32_t>(to, in, count, reduction);
    case UINT32: return reduce_plain<uint32_t>(to, in, count, reduction);
    case INT64: return reduce_plain<int64_t>(to, in, count, reduction);
    case UINT64: return reduce_plain<uint64_t>(to, in, count, reduction);
    case FLOAT32: return reduce_plain<float>(to, in, count, reduction);
    case FLOAT64: return reduce_plain<double>(to, in, count, reduction);
    case FLOAT16: return reduce_as<uint16_t, float>(to, in, count, reduction, from_half, to_half);
    case BFLOAT16: return reduce_as<uint16_t, float>(to, in, count, reduction, from_bfloat16, to_bfloat16);
  }
}

std::vector<char> scaled(const void *from, size_t count, int type, double factor) {
  std::vector<char> result(count * size_of(type));
  switch (type) {
    case FLOAT32: scale_as<float, float>(result.data(), from, count, factor, same<float>, same<float>); break;
    case FLOAT64: scale_as<double, double>(result.data(), from, count, factor, same<double>, same<double>); break;
    case FLOAT16: scale_as<uint16_t, float>(result.data(), from, count, factor, from_half, to_half); break;
    case BFLOAT16: scale_as<uint16_t, float>(result.data(), from, count, factor, from_bfloat16, to_bfloat16); break;
  }
  return result;
}

double first_value(const void *from, int type) {
  switch (type) {
    case FLOAT32: return *static_cast<const float *>(from);
    case FLOAT64: return *static_cast<const double *>(from);
    case FLOAT16: return from_half(*static_cast<const uint16_t *>(from));
    case BFLOAT16: return from_bfloat16(*static_cast<const uint16_t *>(from));
  }
  return 1;
}

}  // namespace fake_nccl
