// SPDX-License-Identifier: Apache-2.0
#include "comm/sharding.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <numeric>

#include "core/check.h"

namespace smp::comm {
namespace {

at::Tensor share_of_blocks(const at::Tensor& tensor, const Blocks& blocks, int index, int ranks) {
  std::vector<at::Tensor> shares;
  int64_t begin = 0;
  for (const int64_t extent : blocks.extents) {
    const int64_t share = extent / ranks;
    shares.push_back(tensor.narrow(blocks.dim, begin + index * share, share));
    begin += extent;
  }
  return at::cat(shares, blocks.dim).contiguous();
}

at::Tensor join_blocks(const std::vector<at::Tensor>& parts, const Blocks& blocks) {
  std::vector<at::Tensor> shares;
  int64_t begin = 0;
  for (const int64_t extent : blocks.extents) {
    const int64_t share = extent / static_cast<int64_t>(parts.size());
    for (const at::Tensor& part : parts) shares.push_back(part.narrow(blocks.dim, begin, share));
    begin += share;
  }
  return at::cat(shares, blocks.dim);
}

/// The elements of flat tensors one after the other: a view where they lie so in memory already, as
/// a tensor's do that was gathered alone.
at::Tensor join_ranges(const std::vector<at::Tensor>& parts, int64_t numel) {
  at::Tensor first;
  int64_t end = 0;
  for (const at::Tensor& part : parts) {
    if (part.numel() == 0) continue;
    const bool follows =
        !first.defined() || (part.is_alias_of(first) && part.storage_offset() == end);
    if (!follows || !part.is_contiguous()) return at::cat(parts);
    if (!first.defined()) first = part;
    end = part.storage_offset() + part.numel();
  }
  return first.defined() ? first.as_strided({numel}, {1}) : parts.front();
}

std::string to_string(const Blocks& blocks) {
  std::string text = c10::str("along dimension ", blocks.dim);
  const auto& extents = blocks.extents;
  if (extents.size() == 1) return text;
  const bool alike = std::equal(extents.begin() + 1, extents.end(), extents.begin());
  return alike ? c10::str(text, " in ", extents.size(), " blocks")
               : c10::str(text, " in blocks of ", at::IntArrayRef(extents));
}

std::string to_string(const Owner& owner) { return c10::str("at position ", owner.position); }

std::string to_string(const Range& range) {
  const std::string text = c10::str(range.length, " elements each");
  return range.offset == 0 ? text : c10::str(text, " from ", range.offset, " before the first");
}

at::Tensor bytes_of(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.view(at::kByte) : tensor;
}

void check_sizes(const at::Tensor& own, const std::vector<int64_t>& sizes) {
  SMP_INTERNAL_ASSERT(own.sizes() == at::IntArrayRef(sizes), "a part of ", own.sizes(),
                      " is joined as one of ", at::IntArrayRef(sizes));
}

/// The sizes of that which the rank at a position gives to undo the last cut.
std::vector<int64_t> given_by(const Sharding& sharding, int rank, int position) {
  const auto& [over, how] = sharding.cuts.back();
  const auto* owner = std::get_if<Owner>(&how);
  if (owner != nullptr && owner->position != position) return {0};
  return sharding.sizes_of(over.member(rank, position));
}

/// The position of the rank that owns all of these, if one does.
std::optional<int> owner_of(const std::vector<Part>& parts) {
  std::optional<int> result;
  for (const Part& part : parts) {
    const auto* owner = std::get_if<Owner>(&part.sharding.cuts.back().how);
    if (!owner || owner->position != result.value_or(owner->position)) return std::nullopt;
    result = owner->position;
  }
  return result;
}

/// `join` where one rank owns all: it gives its own tensors without a copy of them.
std::vector<at::Tensor> give(Communicator& group, const std::vector<Part>& parts,
                             const at::TensorOptions& options, int rank, int owner,
                             std::optional<int> root) {
  constexpr Tag kTag = 0;
  const bool gives = group.rank() == owner, receives = !root || *root == group.rank();
  std::vector<at::Tensor> result(parts.size());
  for (size_t i = 0; i < parts.size() && (gives || receives); ++i) {
    const auto sizes = given_by(parts[i].sharding, rank, owner);
    const bool has_it = gives && parts[i].own.defined();
    const at::Tensor all =
        has_it ? parts[i].own.detach().to(options).contiguous() : at::empty(sizes, options);
    check_sizes(all, sizes);
    const at::Tensor bytes = bytes_of(all.view({-1}));
    if (!root) {
      group.broadcast(bytes, owner);
    } else if (*root != owner) {
      gives ? group.send(bytes, *root, kTag) : group.recv(bytes, owner, kTag);
    }
    if (receives) result[i] = all;
  }
  return result;
}

}  // namespace

std::pair<int64_t, int64_t> Range::of(int index, int64_t numel) const {
  const int64_t first = index * length - offset;
  return {std::clamp<int64_t>(first, 0, numel), std::clamp<int64_t>(first + length, 0, numel)};
}

std::vector<int64_t> Sharding::sizes_of(int rank, size_t count) const {
  std::vector<int64_t> result = sizes;
  for (size_t i = 0; i < count; ++i) {
    const auto& [over, how] = cuts[i];
    if (const auto* blocks = std::get_if<Blocks>(&how)) {
      result[blocks->dim] /= over.size;
    } else if (const auto* range = std::get_if<Range>(&how)) {
      const auto [begin, end] = range->of(over.index_of(rank), c10::multiply_integers(result));
      result = {end - begin};
    }
  }
  return result;
}

bool Sharding::is_on(int rank, size_t count) const {
  return std::all_of(cuts.begin(), cuts.begin() + static_cast<std::ptrdiff_t>(count),
                     [&](const Cut& cut) {
                       const auto* owner = std::get_if<Owner>(&cut.how);
                       return owner == nullptr || owner->position == cut.over.index_of(rank);
                     });
}

std::optional<Sharding> Sharding::along(const core::Axis& axis) const {
  for (size_t i = 0; i < cuts.size(); ++i) {
    const bool divides = !std::holds_alternative<Owner>(cuts[i].how);
    if (divides && cuts[i].over == axis) return Sharding{sizes_of(/*rank=*/0, i), order, {cuts[i]}};
  }
  return std::nullopt;
}

void Sharding::check() const {
  std::vector<int64_t> left = sizes;
  for (size_t i = 0; i < cuts.size(); ++i) {
    const auto& [over, how] = cuts[i];
    SMP_INTERNAL_ASSERT(!std::holds_alternative<Range>(how) || i + 1 == cuts.size(),
                        "a cut follows a range: ", to_string());
    const auto* owner = std::get_if<Owner>(&how);
    SMP_INTERNAL_ASSERT(!owner || (owner->position >= 0 && owner->position < over.size),
                        "no rank owns ", to_string());
    const auto* blocks = std::get_if<Blocks>(&how);
    if (!blocks) continue;
    const auto& extents = blocks->extents;
    const bool even =
        std::all_of(extents.begin(), extents.end(),
                    [size = over.size](int64_t extent) { return extent % size == 0; });
    SMP_INTERNAL_ASSERT(even && c10::sum_integers(extents) == left.at(blocks->dim),
                        "blocks that do not divide evenly: ", to_string());
    left[blocks->dim] /= over.size;
  }
}

at::Tensor Sharding::cut(at::Tensor tensor, int rank, size_t done) const {
  check();
  if (done == cuts.size()) return tensor;
  const std::vector<int64_t> expected = sizes_of(rank, done);
  SMP_INTERNAL_ASSERT(tensor.sizes() == at::IntArrayRef(expected), "a tensor of ", tensor.sizes(),
                      " is cut as one of ", at::IntArrayRef(expected), ": ", to_string());
  for (size_t i = done; i < cuts.size(); ++i) {
    const auto& [over, how] = cuts[i];
    const int index = over.index_of(rank);
    if (const auto* blocks = std::get_if<Blocks>(&how)) {
      tensor = share_of_blocks(tensor, *blocks, index, over.size);
    } else if (const auto* range = std::get_if<Range>(&how)) {
      const auto [begin, end] = range->of(index, tensor.numel());
      tensor = tensor.permute(order).reshape({-1}).slice(0, begin, end);
    }
  }
  return tensor;
}

at::Tensor Sharding::join(const std::vector<at::Tensor>& parts) const {
  check();
  const auto& [over, how] = cuts.back();
  SMP_INTERNAL_ASSERT(static_cast<int>(parts.size()) == over.size, parts.size(), " parts of ",
                      over.size);
  if (const auto* blocks = std::get_if<Blocks>(&how)) return join_blocks(parts, *blocks);
  if (const auto* owner = std::get_if<Owner>(&how)) return parts[owner->position];
  const std::vector<int64_t> sizes = sizes_of(/*rank=*/0, cuts.size() - 1);
  std::vector<int64_t> lying, back(order.size());
  for (size_t i = 0; i < order.size(); ++i) {
    lying.push_back(sizes[order[i]]);
    back[order[i]] = static_cast<int64_t>(i);
  }
  return join_ranges(parts, c10::multiply_integers(sizes)).view(lying).permute(back);
}

std::string Sharding::to_string() const {
  std::string text = c10::str(at::IntArrayRef(sizes));
  for (size_t i = 0; i < cuts.size(); ++i) {
    text += i == 0 ? " " : ", then ";
    text += std::visit([](const auto& how) { return comm::to_string(how); }, cuts[i].how);
    text += c10::str(" over ", cuts[i].over.size, " ranks");
  }
  return text;
}

std::vector<int64_t> memory_order(const at::Tensor& tensor) {
  std::vector<int64_t> order(tensor.dim());
  std::iota(order.begin(), order.end(), 0);
  if (!tensor.is_non_overlapping_and_dense()) return order;
  std::stable_sort(order.begin(), order.end(),
                   [&](int64_t a, int64_t b) { return tensor.stride(a) > tensor.stride(b); });
  return order;
}

std::vector<at::Tensor> join(Communicator& group, const std::vector<Part>& parts,
                             const at::TensorOptions& options, int rank, std::optional<int> root) {
  const at::NoGradGuard no_grad;
  const at::TensorOptions plain = options.requires_grad(std::nullopt);
  if (const auto owner = owner_of(parts)) return give(group, parts, plain, rank, *owner, root);
  const int ranks = group.size();
  int64_t longest = 0;
  for (int r = 0; r < ranks; ++r) {
    int64_t numel = 0;
    for (const Part& part : parts)
      numel += c10::multiply_integers(given_by(part.sharding, rank, r));
    longest = std::max(longest, numel);
  }
  const bool receives = !root || *root == group.rank();
  const at::Tensor all = receives ? at::empty({ranks, longest}, plain) : at::Tensor();
  const at::Tensor mine = receives ? all[group.rank()] : at::empty({longest}, plain);
  int64_t next = 0;
  for (const Part& part : parts) {
    const auto sizes = given_by(part.sharding, rank, group.rank());
    const int64_t numel = c10::multiply_integers(sizes);
    if (part.own.defined() && part.sharding.is_on(rank)) {
      check_sizes(part.own, sizes);
      mine.narrow(0, next, numel).view(sizes).copy_(part.own);
    }
    next += numel;
  }
  root ? group.gather(bytes_of(all), bytes_of(mine), *root)
       : group.all_gather(bytes_of(all), bytes_of(mine));
  std::vector<at::Tensor> result(parts.size());
  if (!receives) return result;
  std::vector<int64_t> begin(ranks, 0);
  for (size_t i = 0; i < parts.size(); ++i) {
    std::vector<at::Tensor> of_ranks;
    for (int r = 0; r < ranks; ++r) {
      const auto sizes = given_by(parts[i].sharding, rank, r);
      const int64_t numel = c10::multiply_integers(sizes);
      of_ranks.push_back(all[r].narrow(0, begin[r], numel).view(sizes));
      begin[r] += numel;
    }
    result[i] = parts[i].sharding.join(of_ranks);
  }
  return result;
}

}  // namespace smp::comm
