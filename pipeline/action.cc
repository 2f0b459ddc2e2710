// SPDX-License-Identifier: Apache-2.0
#include "pipeline/action.h"

#include <cctype>
#include <charconv>

#include "core/check.h"
#include "core/text.h"

namespace smp::pipeline {
namespace {

using Kind = Action::Kind;

struct Spelling {
  Kind kind;
  std::string_view word;
  char arrow;  // before the peer of a transfer or copy, 0 for the others
  std::string_view group;
};

// No word is the beginning of another one, so the first that fits is the right one.
constexpr Spelling kSpellings[] = {
    {Kind::kForward, "F", 0, "forward"},          {Kind::kBackward, "B", 0, "backward"},
    {Kind::kBackwardInput, "I", 0, "inputs"},     {Kind::kBackwardWeight, "W", 0, "weights"},
    {Kind::kSendForward, "SEND_F", '>', "send"},  {Kind::kRecvForward, "RECV_F", '<', "wait"},
    {Kind::kSendBackward, "SEND_B", '>', "send"}, {Kind::kRecvBackward, "RECV_B", '<', "wait"},
    {Kind::kReduce, "REDUCE", 0, "reduce"},       {Kind::kRecall, "RECALL", 0, "recall"},
    {Kind::kSendCopy, "SEND_COPY", '>', "send"},  {Kind::kRecvCopy, "RECV_COPY", '<', "wait"},
    {Kind::kOutputs, "OUTPUTS", 0, "wait"},       {Kind::kUnshard, "UNSHARD", 0, "unshard"},
    {Kind::kReshard, "RESHARD", 0, "reshard"},
};

const Spelling& spelling_of(Kind kind) {
  for (const auto& spelling : kSpellings) {
    if (spelling.kind == kind) {
      return spelling;
    }
  }
  SMP_INTERNAL_ASSERT(false, "action kind ", static_cast<int>(kind));
}

/// Reads one action from left to right and remembers where it is, for the error.
class Cursor {
 public:
  Cursor(std::string_view text, std::string_view where) : text_(text), where_(where) {}

  int number(const char* what) {
    int value = 0;
    const char* begin = text_.data() + position_;
    const char* end = text_.data() + text_.size();
    // from_chars takes a sign; an index has none.
    const bool digit = begin != end && std::isdigit(static_cast<unsigned char>(*begin)) != 0;
    const auto result = std::from_chars(begin, end, value);
    check(digit && result.ec == std::errc(), what);
    position_ += static_cast<size_t>(result.ptr - begin);
    return value;
  }

  const Spelling& word() {
    for (const auto& spelling : kSpellings) {
      if (text_.substr(position_, spelling.word.size()) == spelling.word) {
        position_ += spelling.word.size();
        return spelling;
      }
    }
    fail(
        "F, B, I, W, SEND_F, RECV_F, SEND_B, RECV_B, REDUCE, RECALL, SEND_COPY, RECV_COPY, "
        "OUTPUTS, UNSHARD or RESHARD");
  }

  void arrow(char arrow) {
    const bool found = position_ < text_.size() && text_[position_] == arrow;
    check(found, arrow == '>' ? "'>' and the stage sent to" : "'<' and the stage received from");
    ++position_;
  }

  void end() { check(position_ == text_.size(), "the end of the action"); }

 private:
  void check(bool condition, const char* expected) {
    if (!condition) {
      fail(expected);
    }
  }

  [[noreturn]] void fail(const char* expected) {
    const auto rest = text_.substr(position_);
    ::smp::core::fail<Error>("cannot read the action \"", core::printable(text_, 100), "\"",
                             where_.empty() ? "" : " at ", where_, ": position ", position_,
                             ": expected ", expected, ", got ",
                             rest.empty() ? "the end" : "\"" + core::printable(rest, 100) + "\"",
                             ". Actions look like 0F3, 1B0, 0SEND_F3>1, 1RECV_F3<0 or 1REDUCE.");
  }

  std::string_view text_;
  std::string_view where_;
  size_t position_ = 0;
};

}  // namespace

Action forward_of(int stage, int microbatch) { return {Kind::kForward, stage, microbatch, -1}; }
Action backward_of(int stage, int microbatch) { return {Kind::kBackward, stage, microbatch, -1}; }
Action backward_input_of(int stage, int microbatch) {
  return {Kind::kBackwardInput, stage, microbatch, -1};
}
Action backward_weight_of(int stage, int microbatch) {
  return {Kind::kBackwardWeight, stage, microbatch, -1};
}
Action send_forward(int stage, int microbatch, int to) {
  return {Kind::kSendForward, stage, microbatch, to};
}
Action recv_forward(int stage, int microbatch, int from) {
  return {Kind::kRecvForward, stage, microbatch, from};
}
Action send_backward(int stage, int microbatch, int to) {
  return {Kind::kSendBackward, stage, microbatch, to};
}
Action recv_backward(int stage, int microbatch, int from) {
  return {Kind::kRecvBackward, stage, microbatch, from};
}
Action reduce_of(int stage) { return {Kind::kReduce, stage, -1, -1}; }
Action unshard_of(int stage) { return {Kind::kUnshard, stage, -1, -1}; }
Action reshard_of(int stage) { return {Kind::kReshard, stage, -1, -1}; }
Action recall_of(int stage, int microbatch) { return {Kind::kRecall, stage, microbatch, -1}; }
Action send_copy(int stage, int to) { return {Kind::kSendCopy, stage, -1, to}; }
Action recv_copy(int stage, int from) { return {Kind::kRecvCopy, stage, -1, from}; }
Action outputs_of(int stage) { return {Kind::kOutputs, stage, -1, -1}; }

std::pair<int, int> stages_of(const Action& copy) {
  const bool sends = copy.kind == Kind::kSendCopy;
  return {sends ? copy.stage : copy.peer, sends ? copy.peer : copy.stage};
}

Action counterpart(const Action& transfer) {
  const auto other_end = [&](Kind kind) {
    return Action{kind, transfer.peer, transfer.microbatch, transfer.stage};
  };
  switch (transfer.kind) {
    case Kind::kSendForward:
      return other_end(Kind::kRecvForward);
    case Kind::kRecvForward:
      return other_end(Kind::kSendForward);
    case Kind::kSendBackward:
      return other_end(Kind::kRecvBackward);
    case Kind::kRecvBackward:
      return other_end(Kind::kSendBackward);
    case Kind::kSendCopy:
      return other_end(Kind::kRecvCopy);
    case Kind::kRecvCopy:
      return other_end(Kind::kSendCopy);
    default:
      SMP_INTERNAL_ASSERT(false, to_string(transfer), " is not a transfer");
  }
}

bool operator==(const Action& a, const Action& b) {
  return a.kind == b.kind && a.stage == b.stage && a.microbatch == b.microbatch && a.peer == b.peer;
}

std::string to_string(const Action& action) {
  const auto& spelling = spelling_of(action.kind);
  std::string text = std::to_string(action.stage);
  text += spelling.word;
  if (!action.is_of_stage()) {
    text += std::to_string(action.microbatch);
  }
  if (spelling.arrow != 0) {
    text += spelling.arrow + std::to_string(action.peer);
  }
  return text;
}

std::string_view group_of(const Action& action) { return spelling_of(action.kind).group; }

Action parse_action(std::string_view text, std::string_view where) {
  Cursor cursor(text, where);
  Action action;
  action.stage = cursor.number("a stage number");
  const auto& spelling = cursor.word();
  action.kind = spelling.kind;
  if (!action.is_of_stage()) {
    action.microbatch = cursor.number("a microbatch number");
  }
  if (spelling.arrow != 0) {
    cursor.arrow(spelling.arrow);
    action.peer = cursor.number("a stage number");
  }
  cursor.end();
  return action;
}

}  // namespace smp::pipeline
