// oneDNN's convolution and matrix product as calls of XLA:CPU's foreign function interface.
//
// A call is computed in parts, whose number the program has: groups of images, rows or columns. So
// the results don't depend on the number of cores. Each part is computed by one thread of XLA's
// pool, and oneDNN's loops have one thread.
#include <omp.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "oneapi/dnnl/dnnl.hpp"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;
using dnnl::memory;
using Dims = memory::dims;
using Numbers = ffi::Span<const int64_t>;

namespace {

const dnnl::engine& cpu() {
  static const dnnl::engine engine(dnnl::engine::kind::cpu, 0);
  return engine;
}

// One thread for oneDNN's loops in this thread, as XLA's pool has the others.
struct OneThread {
  int before = omp_get_max_threads();
  OneThread() { omp_set_num_threads(1); }
  ~OneThread() { omp_set_num_threads(before); }
};

struct Parts {
  std::function<void(int64_t)> compute;
  int64_t count;
  std::atomic<int64_t> next{0}, done{0};
  std::mutex mutex;
  std::string error;
  void take() {
    OneThread one;
    for (int64_t i; (i = next.fetch_add(1)) < count; done.fetch_add(1)) {
      try {
        compute(i);
      } catch (const std::exception& failed) {
        std::lock_guard<std::mutex> lock(mutex);
        error = failed.what();
      }
    }
  }
};

// The caller computes too, and waits only for parts that run: so no full pool blocks it.
std::string compute_parts(ffi::ThreadPool& pool, int64_t count, std::function<void(int64_t)> compute) {
  auto parts = std::make_shared<Parts>();
  parts->compute = std::move(compute);
  parts->count = count;
  int64_t others = std::min<int64_t>(pool.num_threads(), count) - 1;
  for (int64_t i = 0; i < others; ++i) pool.Schedule([parts] { parts->take(); });
  parts->take();
  while (parts->done.load() < count) std::this_thread::yield();
  return parts->error;
}

memory::data_type to_type(ffi::DataType type) {
  switch (type) {
    case ffi::DataType::BF16: return memory::data_type::bf16;
    case ffi::DataType::F32: return memory::data_type::f32;
    default: throw std::runtime_error("must be float32 or bfloat16");
  }
}

struct Plan {
  dnnl::primitive primitive;
  memory::desc left, right, result, packed, scratch;
};

// A plan for each call's shapes and attributes; primitives are free of state and shared by threads.
std::shared_ptr<const Plan> find_plan(const std::string& key, const std::function<Plan()>& make) {
  static std::mutex mutex;
  static std::map<std::string, std::shared_ptr<const Plan>> plans;
  std::lock_guard<std::mutex> lock(mutex);
  auto& plan = plans[key];
  if (!plan) {
    OneThread one;
    plan = std::make_shared<const Plan>(make());
  }
  return plan;
}

void add_to_key(std::string& key, int64_t value) { key += std::to_string(value) + ' '; }
template <typename Values> void add_all(std::string& key, const Values& values) {
  for (int64_t value : values) add_to_key(key, value);
  key += ';';
}

dnnl::primitive_attr make_attributes() {
  dnnl::primitive_attr attributes;
  attributes.set_scratchpad_mode(dnnl::scratchpad_mode::user);
  return attributes;
}

void execute(const Plan& plan, void* left, const memory& right, void* result) {
  dnnl::stream stream(cpu());
  memory scratch(plan.scratch, cpu());
  plan.primitive.execute(stream, {{DNNL_ARG_SRC, memory(plan.left, cpu(), left)},
                                  {DNNL_ARG_WEIGHTS, right},
                                  {DNNL_ARG_DST, memory(plan.result, cpu(), result)},
                                  {DNNL_ARG_SCRATCHPAD, scratch}});
  stream.wait();
}

ffi::Error to_error(const std::string& text) {
  return text.empty() ? ffi::Error::Success() : ffi::Error::Internal("oneDNN: " + text);
}

ffi::Error convolve(ffi::ThreadPool pool, ffi::AnyBuffer images, ffi::AnyBuffer kernel,
                    ffi::Result<ffi::AnyBuffer> result, Numbers strides, Numbers pads,
                    Numbers dilation, int64_t groups, int64_t count) {
  try {
    auto in = images.dimensions(), window = kernel.dimensions(), out = result->dimensions();
    auto make = [&]() {
      auto tag = memory::format_tag::nhwc;
      auto type = to_type(images.element_type());
      Plan plan;
      plan.left = memory::desc({count, in[3], in[1], in[2]}, type, tag);
      plan.result = memory::desc({count, out[3], out[1], out[2]}, to_type(result->element_type()), tag);
      Dims dense{window[3], window[2], window[0], window[1]};
      Dims grouped{groups, window[3] / groups, window[2], window[0], window[1]};
      auto any = memory::format_tag::any;
      auto weights = memory::desc(groups > 1 ? grouped : dense, type, any);
      plan.right = memory::desc(groups > 1 ? grouped : dense, to_type(kernel.element_type()),
                                groups > 1 ? memory::format_tag::hwigo : memory::format_tag::hwio);
      Dims steps{strides[0], strides[1]}, spread{dilation[0] - 1, dilation[1] - 1};
      dnnl::convolution_forward::primitive_desc found(
          cpu(), dnnl::prop_kind::forward_inference, dnnl::algorithm::convolution_direct,
          plan.left, weights, plan.result, steps, spread, {pads[0], pads[2]}, {pads[1], pads[3]},
          make_attributes());
      plan.packed = found.weights_desc();
      plan.scratch = found.scratchpad_desc();
      plan.primitive = dnnl::convolution_forward(found);
      return plan;
    };
    std::string key = "convolution ";
    for (auto type : {images.element_type(), kernel.element_type(), result->element_type()})
      add_to_key(key, static_cast<int64_t>(type));
    add_all(key, in), add_all(key, window), add_all(key, out), add_all(key, strides);
    add_all(key, pads), add_all(key, dilation), add_to_key(key, groups), add_to_key(key, count);
    auto plan = find_plan(key, make);
    memory weights(plan->right, cpu(), kernel.untyped_data());
    if (plan->packed != plan->right) {
      OneThread one;
      memory packed(plan->packed, cpu());
      dnnl::stream stream(cpu());
      dnnl::reorder(weights, packed).execute(stream, weights, packed);
      stream.wait();
      weights = packed;
    }
    auto* from = static_cast<char*>(images.untyped_data());
    auto* to = static_cast<char*>(result->untyped_data());
    int64_t read = plan->left.get_size(), written = plan->result.get_size();
    return to_error(compute_parts(pool, in[0] / count, [=](int64_t i) {
      execute(*plan, from + i * read, weights, to + i * written);
    }));
  } catch (const std::exception& failed) {
    return to_error(failed.what());
  }
}

// The sizes of a product, or of each product of a stack: m x k by k x n.
struct Product {
  int64_t stack = 1, m, k, n;
  bool transpose_a, transpose_b;
  memory::data_type left, right, result;

  int64_t left_bytes() const { return m * k * size_of(left); }
  int64_t right_bytes() const { return k * n * size_of(right); }
  int64_t result_bytes() const { return m * n * size_of(result); }
  static int64_t size_of(memory::data_type type) { return memory::data_type_size(type); }
};

std::shared_ptr<const Plan> plan_product(const Product& sizes, int64_t rows, int64_t columns) {
  std::string key = "product ";
  for (auto type : {sizes.left, sizes.right, sizes.result}) add_to_key(key, static_cast<int64_t>(type));
  for (int64_t value : {sizes.m, sizes.k, rows, columns}) add_to_key(key, value);
  add_to_key(key, sizes.transpose_a), add_to_key(key, sizes.transpose_b);
  return find_plan(key, [&]() {
    Plan plan;
    plan.left = memory::desc({rows, sizes.k}, sizes.left,
                             sizes.transpose_a ? Dims{1, sizes.m} : Dims{sizes.k, 1});
    plan.right = memory::desc({sizes.k, columns}, sizes.right,
                              sizes.transpose_b ? Dims{1, sizes.k} : Dims{columns, 1});
    plan.result = memory::desc({rows, columns}, sizes.result, Dims{columns, 1});
    dnnl::matmul::primitive_desc found(cpu(), plan.left, plan.right, plan.result, make_attributes());
    plan.scratch = found.scratchpad_desc();
    plan.primitive = dnnl::matmul(found);
    return plan;
  });
}

// Columns `first` and later of the right matrix by all of the left one, through copies: oneDNN's
// fast kernels need matrices without gaps.
void multiply_columns(const Product& sizes, const Plan& plan, int64_t columns, int64_t first,
                      char* left, const char* right, char* result) {
  int64_t width = columns * Product::size_of(sizes.right), pitch = sizes.n * Product::size_of(sizes.right);
  std::vector<char> copy(sizes.transpose_b ? 0 : sizes.k * width);
  if (!sizes.transpose_b)
    for (int64_t row = 0; row < sizes.k; ++row)
      std::memcpy(&copy[row * width], right + row * pitch + first * Product::size_of(sizes.right), width);
  const char* part = sizes.transpose_b ? right + first * sizes.k * Product::size_of(sizes.right) : copy.data();
  int64_t size = Product::size_of(sizes.result), out_width = columns * size;
  std::vector<char> out(sizes.m * out_width);
  execute(plan, left, memory(plan.right, cpu(), const_cast<char*>(part)), out.data());
  for (int64_t row = 0; row < sizes.m; ++row)
    std::memcpy(result + row * sizes.n * size + first * size, &out[row * out_width], out_width);
}

ffi::Error multiply(ffi::ThreadPool pool, ffi::AnyBuffer left, ffi::AnyBuffer right,
                    ffi::Result<ffi::AnyBuffer> result, bool transpose_a, bool transpose_b,
                    int64_t parts) {
  try {
    auto out = result->dimensions(), in = left.dimensions();
    size_t axes = out.size();
    Product sizes;
    sizes.m = out[axes - 2], sizes.n = out[axes - 1];
    sizes.k = in[transpose_a ? axes - 2 : axes - 1];
    sizes.transpose_a = transpose_a, sizes.transpose_b = transpose_b;
    sizes.left = to_type(left.element_type()), sizes.right = to_type(right.element_type());
    sizes.result = to_type(result->element_type());
    for (size_t axis = 0; axis + 2 < axes; ++axis) sizes.stack *= out[axis];
    auto* a = static_cast<char*>(left.untyped_data());
    auto* b = static_cast<char*>(right.untyped_data());
    auto* c = static_cast<char*>(result->untyped_data());
    if (axes > 2) {
      auto plan = plan_product(sizes, sizes.m, sizes.n);
      return to_error(compute_parts(pool, sizes.stack, [=](int64_t i) {
        memory matrix(plan->right, cpu(), b + i * sizes.right_bytes());
        execute(*plan, a + i * sizes.left_bytes(), matrix, c + i * sizes.result_bytes());
      }));
    }
    if (transpose_a && parts > 1) {
      int64_t columns = sizes.n / parts;
      auto plan = plan_product(sizes, sizes.m, columns);
      return to_error(compute_parts(pool, parts, [=](int64_t i) {
        multiply_columns(sizes, *plan, columns, i * columns, a, b, c);
      }));
    }
    auto plan = plan_product(sizes, sizes.m / parts, sizes.n);
    return to_error(compute_parts(pool, parts, [=](int64_t i) {
      int64_t left_step = sizes.left_bytes() / parts, result_step = sizes.result_bytes() / parts;
      execute(*plan, a + i * left_step, memory(plan->right, cpu(), b), c + i * result_step);
    }));
  } catch (const std::exception& failed) {
    return to_error(failed.what());
  }
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(convolution_call, convolve,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<Numbers>("strides")
                                  .Attr<Numbers>("pads")
                                  .Attr<Numbers>("dilation")
                                  .Attr<int64_t>("groups")
                                  .Attr<int64_t>("images"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(matmul_call, multiply,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<bool>("transpose_a")
                                  .Attr<bool>("transpose_b")
                                  .Attr<int64_t>("parts"));
