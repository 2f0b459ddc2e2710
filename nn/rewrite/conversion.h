// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <utility>
#include <vector>

#include "nn/rewrite/call.h"
#include "nn/rewrite/divide.h"

namespace smp::nn::rewrite {

/// An operator that turns one layout of a value into another.
enum class Collective : uint8_t {
  kCopy,           ///< whole -> shared
  kReduce,         ///< partial -> whole
  kScatter,        ///< whole -> divided
  kGather,         ///< divided -> whole
  kAllGather,      ///< divided -> shared
  kReduceScatter,  ///< partial -> divided
  kAllToAll,       ///< divided -> divided along another dimension
};

/// The operator that does it: `name` is called with the tensor, the divided dimension of the result
/// and that of the argument, as far as these are divided, and their blocks if it takes any.
struct CollectiveForm {
  const char* name;
  bool takes_blocks;
  int forward, backward;  ///< how often a rank sends its share of the value in each pass
};
const CollectiveForm& form_of(Collective collective);

struct Conversion {
  Collective collective;
  Layout from;
  Layout to;
};

/// The first conversion on the way from one layout to another. They must differ.
Conversion first_conversion(const Layout& from, const Layout& to);

/// The traffic for a value of so many bytes (whole); backwards only with a gradient.
Traffic traffic_of(Collective collective, int64_t bytes, bool has_gradient, int ranks);

/// The traffic inside the operators that stand for a call: for sums, and for gathers, in the
/// forward pass and again for the weight's gradient, while that of the input is summed to parts.
Traffic traffic_inside(const Call& call, const Treatment& treatment);

/// The predicted time of forward and backward.
std::pair<double, double> times_of(const Traffic& traffic, const DivideOptions& options);

/// Which layouts of values exist already while a graph is walked through: `Id` stands for a value
/// in a layout.
template <class Id>
class Conversions {
 public:
  /// For a graph of so many values.
  explicit Conversions(size_t values) : known_(values) {}

  void clear() {
    for (auto& list : known_) list.clear();
  }
  void add(graph::ValueId value, const Layout& layout, Id id) {
    known_[value].emplace_back(layout, std::move(id));
  }
  /// Makes a written value be converted anew; `home` is the layout it exists in.
  void forget(graph::ValueId value, const Layout& home) {
    auto& list = known_[value];
    list.erase(std::remove_if(list.begin(), list.end(),
                              [&](const auto& known) { return known.first != home; }),
               list.end());
  }
  /// Gives the value in a layout, with the conversions that are missing: `convert(conversion, id)`
  /// makes one and returns its result.
  template <class Convert>
  Id get(graph::ValueId value, Layout wanted, bool has_gradient, const Convert& convert) {
    if (!has_gradient && wanted == Layout::shared()) wanted = Layout::whole();
    auto& list = known_[value];
    const auto find = [&](const Layout& layout) {
      for (size_t i = 0; i < list.size(); ++i) {
        if (list[i].first == layout) return static_cast<int>(i);
      }
      return -1;
    };
    int at = find(wanted);
    if (at >= 0) return list[at].second;
    at = std::max(find(Layout::whole()), 0);
    while (list[at].first != wanted) {
      const Conversion next = first_conversion(list[at].first, wanted);
      Id id = convert(next, list[at].second);
      list.emplace_back(next.to, std::move(id));
      at = static_cast<int>(list.size()) - 1;
    }
    return list[at].second;
  }

 private:
  std::vector<std::vector<std::pair<Layout, Id>>> known_;  // known forms of each value
};

}  // namespace smp::nn::rewrite
