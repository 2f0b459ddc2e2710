// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <string_view>
#include <utility>

namespace smp::pipeline {

/// One thing a rank does in a step. A schedule is a list of actions for each rank.
///
/// Text form, as printed and parsed:
///
///     0F3          forward of microbatch 3 on stage 0
///     1B0          backward of microbatch 0 on stage 1: gradients of its inputs and parameters
///     1I0          the first half of a split backward: the gradients of the inputs only
///     1W0          its second half: the gradients of the parameters ("weights")
///     0SEND_F3>1   stage 0 sends its boundary values of microbatch 3 to stage 1
///     1RECV_F3<0   stage 1 waits for them
///     1SEND_B3>0   stage 1 sends the gradients of those values back to stage 0
///     0RECV_B3<1   stage 0 waits for them
///     1REDUCE      the gradients of stage 1 are complete and may be reduced
///     1UNSHARD     begins to gather the divided parameters that stage 1 reads
///     1RESHARD     frees them but for this rank's shards
///     1RECALL3     begins to bring back the tensors of microbatch 3 on stage 1 from a store
///     0SEND_COPY>1 stage 0 sends the parameters and buffers that it owns and stage 1 reads, too
///     1RECV_COPY<0 stage 1 takes them
///     1OUTPUTS     the outputs of stage 1 go to all ranks; each has the action
///
/// Receives are posted ahead by the executor, so a receive action only means "wait for it".
struct Action {
  /// The computes first, see `is_compute`.
  enum class Kind {
    kForward,
    kBackward,
    kBackwardInput,
    kBackwardWeight,
    kSendForward,
    kRecvForward,
    kSendBackward,
    kRecvBackward,
    kReduce,
    kRecall,
    kSendCopy,
    kRecvCopy,
    kOutputs,
    kUnshard,
    kReshard,
  };

  Kind kind = Kind::kForward;
  /// The stage that acts.
  int stage = 0;
  /// The microbatch, -1 for an action of the stage as a whole.
  int microbatch = -1;
  /// The stage at the other end of a transfer or copy, -1 for everything else.
  int peer = -1;

  bool is_send() const { return kind == Kind::kSendForward || kind == Kind::kSendBackward; }
  bool is_recv() const { return kind == Kind::kRecvForward || kind == Kind::kRecvBackward; }
  bool is_transfer() const { return is_send() || is_recv(); }
  bool is_copy() const { return kind == Kind::kSendCopy || kind == Kind::kRecvCopy; }
  bool is_compute() const { return kind <= Kind::kBackwardWeight; }
  /// Is about the stage as a whole, and not about a microbatch.
  bool is_of_stage() const { return kind >= Kind::kReduce && kind != Kind::kRecall; }
  /// Is added to a lowered schedule for a program's needs, see frame.h and unsharding.h.
  bool is_added() const { return kind >= Kind::kRecall; }
  /// Belongs to the backward pass.
  bool is_backward() const {
    return (is_compute() && kind != Kind::kForward) || kind == Kind::kSendBackward ||
           kind == Kind::kRecvBackward;
  }
  /// Makes the gradients that go back to earlier stages: B or I.
  bool makes_input_gradients() const {
    return kind == Kind::kBackward || kind == Kind::kBackwardInput;
  }
  /// Adds to the gradients of the parameters, and is the last to use the forward's kept tensors: B
  /// or W.
  bool makes_weight_gradients() const {
    return kind == Kind::kBackward || kind == Kind::kBackwardWeight;
  }
};

Action forward_of(int stage, int microbatch);
Action backward_of(int stage, int microbatch);
Action backward_input_of(int stage, int microbatch);
Action backward_weight_of(int stage, int microbatch);
Action send_forward(int stage, int microbatch, int to);
Action recv_forward(int stage, int microbatch, int from);
Action send_backward(int stage, int microbatch, int to);
Action recv_backward(int stage, int microbatch, int from);
Action reduce_of(int stage);
Action unshard_of(int stage);
Action reshard_of(int stage);
Action recall_of(int stage, int microbatch);
Action send_copy(int stage, int to);
Action recv_copy(int stage, int from);
Action outputs_of(int stage);

/// The owner and the reader of a copy.
std::pair<int, int> stages_of(const Action& copy);

/// The other end of a transfer or copy: the receive of a send, the send of a receive.
Action counterpart(const Action& transfer);

bool operator==(const Action& a, const Action& b);

std::string to_string(const Action& action);

/// The action in one word, for tables and pictures: "forward", "backward", "inputs" and "weights"
/// for the halves of a backward, "send", "wait", "reduce", "recall", "unshard" or "reshard".
std::string_view group_of(const Action& action);

/// Parses the text form above. Throws `smp::Error` that names `where` (for example
/// "line 3, column 9"), the text, and the position in it at which something else was expected.
Action parse_action(std::string_view text, std::string_view where = "");

}  // namespace smp::pipeline
