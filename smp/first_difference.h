#pragma once

#include <string>
#include <utility>

namespace smp {

/// The first line in which two texts differ, of each; "(nothing)" where a text has ended. Equal
/// texts give twice "(nothing)".
std::pair<std::string, std::string> first_difference(const std::string& a, const std::string& b);

}  // namespace smp
