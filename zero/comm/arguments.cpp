// The checks of arguments.h. Each message starts with what was expected and ends
// with the operation and this rank.

#include <zero/comm/arguments.h>

#include <cmath>
#include <string>

#include <c10/util/Exception.h>

#include <zero/comm/operation_header.h>

namespace zero::comm {
namespace {

class Checker {
 public:
  Checker(const Place& place, Kind kind, const Tag& tag) : place_(place), kind_(kind), tag_(tag) {}

  std::string where() const {
    return c10::str(
        " in ", describe(kind_, tag_), " (rank ", place_.rank, " of ", place_.size, ")");
  }

  void buffer(const at::Tensor& tensor, const char* name) const {
    TORCH_CHECK_VALUE(
        tensor.defined(), "[zero.comm] expected a tensor as ", name, ", got none", where());
    TORCH_CHECK_VALUE(
        tensor.device() == place_.device,
        "[zero.comm] expected ",
        name,
        " on ",
        place_.device,
        ", got it on ",
        tensor.device(),
        where(),
        "; keep what a rank trains on one device");
    TORCH_CHECK_VALUE(
        tensor.layout() == at::kStrided && tensor.is_contiguous(),
        "[zero.comm] expected a contiguous ",
        name,
        ", got strides ",
        tensor.strides(),
        " for sizes ",
        tensor.sizes(),
        where(),
        "; pass a flat buffer");
  }

  void reduced_type(const at::Tensor& tensor) const {
    const auto type = tensor.scalar_type();
    TORCH_CHECK_TYPE(
        type == at::kFloat || type == at::kDouble || type == at::kBFloat16 || type == at::kHalf ||
            c10::isIntegralType(type, /*includeBool=*/false),
        "[zero.comm] expected float32, float64, bfloat16, float16 or an integer type to reduce, "
        "got ",
        type,
        where());
  }

  // A sum may be rounded to fewer bits, or not at all, than its terms have.
  void output_type(const at::Tensor& input, const at::Tensor& output) const {
    const auto from = input.scalar_type();
    TORCH_CHECK_TYPE(
        output.scalar_type() == from ||
            (output.scalar_type() == at::kFloat && (from == at::kBFloat16 || from == at::kHalf)),
        "[zero.comm] expected the output to have the input's dtype ",
        from,
        ", or float32 for an input of 16 bits, got ",
        output.scalar_type(),
        where());
  }

  void same_type(const at::Tensor& one, const at::Tensor& other) const {
    TORCH_CHECK_TYPE(
        one.scalar_type() == other.scalar_type(),
        "[zero.comm] expected one dtype, got ",
        one.scalar_type(),
        " and ",
        other.scalar_type(),
        where());
  }

  void count(const at::Tensor& tensor, const char* name, int64_t expected) const {
    TORCH_CHECK_VALUE(
        tensor.numel() == expected,
        "[zero.comm] expected ",
        expected,
        " elements in ",
        name,
        ", got ",
        tensor.numel(),
        where());
  }

  // `shard` may be this rank's slice of `whole`, and nothing else of it.
  void slice(const char* shard, const char* whole, int64_t slice_bytes, int64_t shard_bytes) const {
    const auto* own = whole + place_.rank * slice_bytes;
    const bool apart = shard + shard_bytes <= whole || whole + place_.size * slice_bytes <= shard;
    TORCH_CHECK_VALUE(
        shard_bytes == 0 || (shard == own && shard_bytes == slice_bytes) || apart,
        "[zero.comm] expected a shard that is this rank's own slice of the whole buffer or apart "
        "from it, got one that overlaps other ranks' slices",
        where());
  }

  void reduction(ReduceArguments& arguments, const Reduction& reduction) const {
    TORCH_CHECK_VALUE(
        std::isfinite(reduction.divisor) && reduction.divisor != 0.0,
        "[zero.comm] expected a finite divisor other than 0, got ",
        reduction.divisor,
        where());
    TORCH_CHECK_VALUE(
        reduction.divisor == 1.0 || c10::isFloatingType(arguments.dtype),
        "[zero.comm] expected the divisor 1 for a sum of ",
        arguments.dtype,
        ", got ",
        reduction.divisor,
        where());
    arguments.divisor = reduction.divisor;
    arguments.addend = reduction.addend;
    if (reduction.addend.defined()) {
      buffer(reduction.addend, "the addend");
      same_type(reduction.addend, arguments.output);
      count(reduction.addend, "the addend", arguments.count);
      arguments.addend_data = static_cast<const char*>(reduction.addend.const_data_ptr());
    }
  }

 private:
  const Place& place_;
  const Kind kind_;
  const Tag& tag_;
};

} // namespace

ReduceArguments check_reduce_scatter(
    const Place& place,
    const at::Tensor& output,
    const at::Tensor& input,
    const Reduction& reduction,
    const Tag& tag) {
  const Checker check(place, Kind::reduce_scatter, tag);
  check.buffer(output, "the output");
  check.buffer(input, "the input");
  check.reduced_type(input);
  check.output_type(input, output);
  check.count(input, "the input", place.size * output.numel());

  ReduceArguments arguments;
  arguments.input = input;
  arguments.output = output;
  arguments.whole = static_cast<const char*>(input.const_data_ptr());
  arguments.shard = static_cast<char*>(output.mutable_data_ptr());
  arguments.dtype = input.scalar_type();
  arguments.count = output.numel();
  arguments.item_size = static_cast<int64_t>(input.element_size());
  arguments.out_dtype = output.scalar_type();
  arguments.out_item_size = static_cast<int64_t>(output.element_size());
  check.slice(
      arguments.shard,
      arguments.whole,
      arguments.shard_bytes(),
      arguments.out_bytes(arguments.shard_bytes()));
  check.reduction(arguments, reduction);
  return arguments;
}

ReduceArguments check_all_reduce(
    const Place& place,
    const at::Tensor& tensor,
    const Reduction& reduction,
    const Tag& tag) {
  const Checker check(place, Kind::all_reduce, tag);
  check.buffer(tensor, "the tensor");
  check.reduced_type(tensor);
  TORCH_CHECK_VALUE(
      tensor.numel() % place.size == 0,
      "[zero.comm] expected a multiple of ",
      place.size,
      " elements, got ",
      tensor.numel(),
      check.where(),
      "; pad the buffer");

  ReduceArguments arguments;
  arguments.input = tensor;
  arguments.output = tensor;
  auto* data = static_cast<char*>(tensor.mutable_data_ptr());
  arguments.dtype = tensor.scalar_type();
  arguments.count = tensor.numel() / place.size;
  arguments.item_size = static_cast<int64_t>(tensor.element_size());
  arguments.out_dtype = arguments.dtype;
  arguments.out_item_size = arguments.item_size;
  arguments.whole = data;
  arguments.shard = data + place.rank * arguments.shard_bytes();
  check.reduction(arguments, reduction);
  return arguments;
}

GatherArguments check_all_gather(
    const Place& place,
    const at::Tensor& output,
    const at::Tensor& input,
    const Tag& tag) {
  const Checker check(place, Kind::all_gather, tag);
  check.buffer(output, "the output");
  check.buffer(input, "the input");
  check.same_type(input, output);
  check.count(output, "the output", place.size * input.numel());

  GatherArguments arguments;
  arguments.input = input;
  arguments.output = output;
  arguments.shard = static_cast<const char*>(input.const_data_ptr());
  arguments.whole = static_cast<char*>(output.mutable_data_ptr());
  arguments.shard_bytes = static_cast<int64_t>(input.nbytes());
  check.slice(arguments.shard, arguments.whole, arguments.shard_bytes, arguments.shard_bytes);
  return arguments;
}

GatherArguments gather_of(const ReduceArguments& all_reduce) {
  GatherArguments arguments;
  arguments.input = all_reduce.output;
  arguments.output = all_reduce.output;
  arguments.shard = all_reduce.shard;
  arguments.whole = const_cast<char*>(all_reduce.whole); // the same buffer as the output
  arguments.shard_bytes = all_reduce.shard_bytes();
  return arguments;
}

void check_broadcast(const Place& place, const at::Tensor& tensor, int64_t root, const Tag& tag) {
  const Checker check(place, Kind::broadcast, tag);
  check.buffer(tensor, "the tensor");
  TORCH_CHECK_VALUE(
      0 <= root && root < place.size,
      "[zero.comm] expected a root from 0 to ",
      place.size - 1,
      ", got ",
      root,
      check.where());
}

void check_exchange(const Place& place, const at::Tensor& bytes, const Tag& tag) {
  const Checker check(place, Kind::exchange, tag);
  check.buffer(bytes, "the message");
  TORCH_CHECK_TYPE(
      bytes.scalar_type() == at::kByte,
      "[zero.comm] expected a message of uint8, got ",
      bytes.scalar_type(),
      check.where());
  TORCH_CHECK_VALUE(
      bytes.dim() == 1,
      "[zero.comm] expected a one-dimensional message, got sizes ",
      bytes.sizes(),
      check.where());
}

} // namespace zero::comm
