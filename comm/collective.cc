// SPDX-License-Identifier: Apache-2.0
#include "comm/collective.h"

#include <algorithm>
#include <array>
#include <numeric>

#include "comm/reduce.h"
#include "core/check.h"

namespace smp {

const char* to_string(ReduceOp op) {
  constexpr std::array kNames = {"sum",     "average",     "min",        "max",
                                 "product", "bitwise and", "bitwise or", "bitwise xor"};
  static_assert(kNames.size() == static_cast<size_t>(ReduceOp::kBitXor) + 1);
  return kNames.at(static_cast<size_t>(op));
}

namespace comm {
namespace {

using Kind = Collective::Kind;

std::string place_text(at::Device device) { return device.is_cpu() ? "the CPU" : device.str(); }

// A call and who makes it: the checks need it for their texts.
struct Caller {
  const Collective& call;
  const std::string& group;
  int rank;
  int size;

  const char* verb() const { return call.name(); }
};

void check_same_dtype(const Caller& caller) {
  const Collective& call = caller.call;
  SMP_CHECK_WITH(UsageError, call.output.scalar_type() == call.input.scalar_type(), caller.verb(),
                 " on group '", caller.group, "': expected output and input of the same type, got ",
                 call.output.scalar_type(), " and ", call.input.scalar_type(), ".");
}

// That `whole` has size() times the elements of `part`.
void check_parts(const Caller& caller, const char* whole_name, const at::Tensor& whole,
                 const char* part_name, const at::Tensor& part) {
  SMP_CHECK_WITH(
      UsageError,
      whole.scalar_type() == part.scalar_type() && whole.numel() == part.numel() * caller.size,
      caller.verb(), " on group '", caller.group, "': expected an ", whole_name, " of ",
      caller.size, " x ", part.numel(), " elements of ", part.scalar_type(), ", got ",
      whole.numel(), " of ", whole.scalar_type(), ". Allocate size() times the ", part_name, ".");
}

void fill_splits(const Caller& caller, const char* argument, const at::Tensor& tensor,
                 std::vector<int64_t>& splits) {
  if (splits.empty()) {
    splits.assign(static_cast<size_t>(caller.size), tensor.numel() / caller.size);
  }
  const bool fit = splits.size() == static_cast<size_t>(caller.size) &&
                   *std::min_element(splits.begin(), splits.end()) >= 0 &&
                   std::accumulate(splits.begin(), splits.end(), int64_t{0}) == tensor.numel();
  SMP_CHECK_WITH(UsageError, fit, caller.verb(), " on group '", caller.group, "': the ",
                 tensor.numel(), " elements of the ", argument, " do not divide into [",
                 c10::Join(", ", splits), "], one number for each of the ", caller.size, " ranks.");
}

}  // namespace

const char* Collective::name(Kind kind) {
  constexpr std::array kNames = {"all_reduce",     "reduce",       "broadcast", "all_gather",
                                 "reduce_scatter", "all_to_all",   "gather",    "scatter",
                                 "barrier",        "shared_tensor"};
  static_assert(kNames.size() == static_cast<size_t>(Kind::kSharedTensor) + 1);
  return kNames.at(static_cast<size_t>(kind));
}

bool Collective::has_root() const {
  return kind == Kind::kReduce || kind == Kind::kBroadcast || kind == Kind::kGather ||
         kind == Kind::kScatter;
}

bool Collective::reads(int rank) const {
  const bool is_from_root = kind == Kind::kBroadcast || kind == Kind::kScatter;
  return kind != Kind::kBarrier && (!is_from_root || rank == root);
}

bool Collective::writes(int rank) const {
  const bool is_to_root = kind == Kind::kReduce || kind == Kind::kGather;
  const bool is_given = kind == Kind::kBroadcast && rank == root;
  return kind != Kind::kBarrier && (!is_to_root || rank == root) && !is_given;
}

bool Signature::operator==(const Signature& other) const {
  return kind == other.kind && op == other.op && dtype == other.dtype &&
         on_device == other.on_device && root == other.root && numel == other.numel;
}

std::string Signature::text() const {
  Collective call;
  call.kind = kind;
  std::string text = call.name();
  if (kind == Kind::kBarrier) {
    return text;
  }
  if (call.reduces()) {
    text += c10::str(" (", to_string(static_cast<ReduceOp>(op)), ")");
  }
  text += " of ";
  if (kind != Kind::kAllToAll) {
    text += c10::str(numel, " x ");
  }
  text += c10::toString(static_cast<c10::ScalarType>(dtype));
  if (on_device) {
    text += " on a device";
  }
  return root < 0 ? text : c10::str(text, " with root ", root);
}

Signature signature_of(const Collective& call) {
  Signature signature;
  signature.kind = call.kind;
  if (call.kind == Kind::kBarrier) {
    return signature;
  }
  const at::Tensor& uniform = call.uniform_tensor();
  signature.op = static_cast<uint8_t>(call.op);
  signature.dtype = static_cast<int8_t>(uniform.scalar_type());
  signature.on_device = !uniform.is_cpu();
  signature.root = call.root;
  signature.numel = call.kind == Kind::kAllToAll ? 0 : uniform.numel();
  return signature;
}

void check_tensor(const std::string& group, const char* verb, const char* argument,
                  const at::Tensor& tensor, at::Device device) {
  SMP_CHECK_WITH(UsageError, tensor.defined(), verb, " on group '", group, "': ", argument,
                 " is undefined.");
  SMP_CHECK_WITH(UsageError, tensor.device() == device, verb, " on group '", group, "': expected ",
                 argument, " to be on ", place_text(device), ", got ", tensor.device(),
                 ". Copy it to ", place_text(device), " first.");
  SMP_CHECK_WITH(UsageError, tensor.layout() == c10::kStrided, verb, " on group '", group,
                 "': expected ", argument, " to be dense, got a tensor of layout ", tensor.layout(),
                 ". Pass to_dense() of it.");
  SMP_CHECK_WITH(UsageError, tensor.is_contiguous(), verb, " on group '", group, "': expected ",
                 argument, " to be contiguous, got sizes ", tensor.sizes(), " with strides ",
                 tensor.strides(), ". Pass contiguous() of it.");
  SMP_CHECK_WITH(UsageError, !tensor.is_conj() && !tensor.is_neg(), verb, " on group '", group,
                 "': expected ", argument,
                 " to hold its values, got a conjugate or negative view "
                 "of others. Pass resolve_conj().resolve_neg() of it.");
}

void check_rank(const std::string& group, const char* verb, const char* argument, int rank,
                int size) {
  SMP_CHECK_WITH(UsageError, rank >= 0 && rank < size, verb, " on group '", group, "': expected ",
                 argument, " in 0 to ", size - 1, ", got ", rank, ".");
}

void check_collective(Collective& call, const std::string& group, int rank, int size,
                      at::Device device) {
  if (call.kind == Kind::kBarrier) {
    return;
  }
  const Caller caller{call, group, rank, size};
  const bool in_place = call.input.is_same(call.output);
  if (in_place || call.writes(rank)) {
    check_tensor(group, call.name(), in_place ? "tensor" : "output", call.output, device);
  }
  if (!in_place && call.reads(rank)) {
    check_tensor(group, call.name(), "input", call.input, device);
  }
  if (call.has_root()) {
    check_rank(group, call.name(), "root", call.root, size);
  }
  if (call.reduces()) {
    check_can_reduce(group, call.name(), call.input.scalar_type(), call.op);
  }
  switch (call.kind) {
    case Kind::kAllGather:
    case Kind::kGather:
      if (call.writes(rank)) check_parts(caller, "output", call.output, "input", call.input);
      break;
    case Kind::kReduceScatter:
    case Kind::kScatter:
      if (call.reads(rank)) check_parts(caller, "input", call.input, "output", call.output);
      break;
    case Kind::kAllToAll:
      check_same_dtype(caller);
      fill_splits(caller, "output", call.output, call.output_splits);
      fill_splits(caller, "input", call.input, call.input_splits);
      break;
    default:
      break;
  }
}

}  // namespace comm
}  // namespace smp
