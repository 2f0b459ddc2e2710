// SPDX-License-Identifier: Apache-2.0
// Tests of every channel, whether through shared memory or over messages.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <functional>
#include <random>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "comm/message_channel.h"
#include "core/check.h"
#include "tests/comm/harness.h"
#include "tests/comm/test_tensors.h"

namespace smp::comm {
namespace {

using std::chrono::milliseconds;
using ::testing::AllOf;
using ::testing::HasSubstr;

// Ranks of the tests share memory, so channels over messages must be asked for.
enum class Path { kBest, kMessages };

using Param = std::tuple<int, Path>;  // size of the group

std::string name_of(const ::testing::TestParamInfo<Param>& info) {
  const auto& [size, path] = info.param;
  return (path == Path::kBest ? "best" : "messages") + std::to_string(size);
}

class ChannelTest : public ::testing::TestWithParam<Param> {};
INSTANTIATE_TEST_SUITE_P(Ranks, ChannelTest,
                         ::testing::Combine(::testing::ValuesIn(group_sizes()),
                                            ::testing::Values(Path::kBest, Path::kMessages)),
                         name_of);

Channels open(Path path, const CommunicatorPtr& group, const std::vector<ChannelSpec>& outgoing,
              const std::vector<ChannelSpec>& incoming) {
  if (path == Path::kBest) {
    return group->open_channels(outgoing, incoming);
  }
  Channels channels;
  for (const ChannelSpec& spec : outgoing) {
    channels.senders.push_back(make_message_sender(group, spec));
  }
  for (const ChannelSpec& spec : incoming) {
    channels.receivers.push_back(make_message_receiver(group, spec));
  }
  return channels;
}

// Message number `number` from `source` with tag `tag`: bytes that differ in all of the three.
at::Tensor content(int source, int tag, int number, int64_t bytes) {
  std::mt19937_64 engine(1'000'000ull * source + 1000ull * tag + number);
  const at::Tensor result = at::empty({bytes}, at::kByte);
  auto* data = static_cast<char*>(result.mutable_data_ptr());
  for (int64_t i = 0; i < bytes; i += 8) {
    const uint64_t word = engine();
    std::memcpy(data + i, &word, std::min<int64_t>(8, bytes - i));
  }
  return result;
}

void send(Sender& sender, const at::Tensor& message) {
  const at::Tensor& slot = sender.prepare();
  EXPECT_EQ(slot.scalar_type(), at::kByte);
  EXPECT_EQ(slot.sizes(), message.sizes());
  EXPECT_EQ(reinterpret_cast<uintptr_t>(slot.const_data_ptr()) % 64, 0);
  slot.copy_(message);
  sender.send();
}

TEST_P(ChannelTest, CarriesMessagesOfEveryLengthBetweenAllRanks) {
  const auto [size, path] = GetParam();
  on_every_rank(size, [path = path](const CommunicatorPtr& group) {
    for (const int64_t bytes : {0, 1, 63, 64, 65, 4096, 100'001, 1 << 20}) {
      constexpr int kMessages = 4;
      std::vector<ChannelSpec> specs;  // a channel to each rank, itself too, and one from each
      for (int peer = 0; peer < group->size(); ++peer) {
        specs.push_back({peer, 7, bytes, 1, 4});
      }
      Channels channels = open(path, group, specs, specs);
      for (auto& receiver : channels.receivers) {
        receiver->expect(kMessages);
      }
      for (int number = 0; number < kMessages; ++number) {
        for (auto& sender : channels.senders) {
          send(*sender, content(group->rank(), 0, number, bytes));
        }
      }
      for (int number = 0; number < kMessages; ++number) {
        for (int peer = 0; peer < group->size(); ++peer) {
          EXPECT_TRUE(
              same_bits(channels.receivers[peer]->receive(), content(peer, 0, number, bytes)));
        }
      }
      for (auto& sender : channels.senders) {
        sender->flush();
      }
    }
  });
}

// Only rank 0 and 1 take part, on a group of their own; `body` gets the end that this rank has.
void on_channel(const Param& param, const ChannelSpec& spec,
                const std::function<void(Communicator&, Sender*, Receiver*)>& body) {
  const auto [size, path] = param;
  on_every_rank(size, [&, path = path](const CommunicatorPtr& group) {
    Channels channels;
    ChannelSpec mine = spec;
    mine.peer = 1 - group->rank();
    if (group->rank() == 0) {
      channels = open(path, group, {mine}, {});
      body(*group, channels.senders[0].get(), nullptr);
      channels.senders[0]->flush();
    } else if (group->rank() == 1) {
      channels = open(path, group, {}, {mine});
      body(*group, nullptr, channels.receivers[0].get());
    } else {
      body(*group, nullptr, nullptr);
    }
    group->barrier();
  });
}

class ChannelPair : public ::testing::TestWithParam<Param> {};
std::vector<int> sizes_from_two() {
  std::vector<int> sizes = group_sizes();
  sizes.erase(std::remove(sizes.begin(), sizes.end(), 1), sizes.end());
  return sizes;
}
INSTANTIATE_TEST_SUITE_P(Ranks, ChannelPair,
                         ::testing::Combine(::testing::ValuesIn(sizes_from_two()),
                                            ::testing::Values(Path::kBest, Path::kMessages)),
                         name_of);
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(ChannelPair);  // a world of one rank has none

/// Two ranks of many would move no other bytes.
class ChannelOfTwo : public ChannelPair {};
std::vector<int> sizes_of_two() {
  std::vector<int> sizes = sizes_from_two();
  sizes.erase(std::remove_if(sizes.begin(), sizes.end(), [](int size) { return size > 2; }),
              sizes.end());
  return sizes;
}
INSTANTIATE_TEST_SUITE_P(Ranks, ChannelOfTwo,
                         ::testing::Combine(::testing::ValuesIn(sizes_of_two()),
                                            ::testing::Values(Path::kBest, Path::kMessages)),
                         name_of);
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(ChannelOfTwo);  // worlds of other sizes have none

TEST_P(ChannelOfTwo, MovesMegabytes) {
  constexpr int64_t kBytes = 64 << 20;
  on_channel(GetParam(), {0, 1, kBytes, 1, 1}, [](Communicator&, Sender* out, Receiver* in) {
    if (in != nullptr) in->expect(2);
    for (int number = 0; number < 2; ++number) {
      const at::Tensor expected = content(0, 1, number, kBytes);
      if (out != nullptr) send(*out, expected);
      if (in != nullptr) {
        EXPECT_TRUE(same_bits(in->receive(), expected));
      }
    }
  });
}

// Far more messages than slots, of which the receiver holds some and lets them go in another order.
TEST_P(ChannelPair, SlotsComeBackInAnyOrder) {
  constexpr int kMessages = 3000;
  constexpr int64_t kBytes = 200;
  on_channel(GetParam(), {0, 3, kBytes, 5, 2}, [](Communicator&, Sender* out, Receiver* in) {
    if (out != nullptr) {
      for (int number = 0; number < kMessages; ++number) {
        send(*out, content(0, 3, number, kBytes));
      }
    }
    if (in != nullptr) {
      in->expect(kMessages);
      std::mt19937 engine(1);
      std::deque<std::pair<int, at::Tensor>> held;
      const auto let_go = [&](size_t index) {
        EXPECT_TRUE(same_bits(held[index].second, content(0, 3, held[index].first, kBytes)));
        held.erase(held.begin() + static_cast<int64_t>(index));
      };
      for (int number = 0; number < kMessages; ++number) {
        held.emplace_back(number, in->receive());
        if (held.size() == 5) let_go(engine() % held.size());
      }
      while (!held.empty()) let_go(engine() % held.size());
    }
  });
}

TEST_P(ChannelPair, AReceiverThatHoldsMoreThanItSaidStopsNobody) {
  constexpr int kMessages = 20;
  on_channel(GetParam(), {0, 2, 1000, 2, 1}, [](Communicator&, Sender* out, Receiver* in) {
    std::vector<at::Tensor> held;
    if (in != nullptr) in->expect(kMessages);
    for (int number = 0; number < kMessages; ++number) {
      if (out != nullptr) send(*out, content(0, 2, number, 1000));
      if (in != nullptr) held.push_back(in->receive());
    }
    for (size_t number = 0; number < held.size(); ++number) {
      EXPECT_TRUE(same_bits(held[number], content(0, 2, static_cast<int>(number), 1000)));
    }
  });
}

TEST_P(ChannelPair, TheSenderDoesNotWaitForAReceiverThatComputes) {
  constexpr int kHeld = 3, kAhead = 2;
  on_channel(GetParam(), {0, 4, 1 << 20, kHeld, kAhead},
             [](Communicator& group, Sender* out, Receiver* in) {
               for (int number = 0; out != nullptr && number < kHeld + kAhead; ++number) {
                 send(*out, content(0, 4, number, 1 << 20));
               }
               if (in != nullptr) in->expect(kHeld + kAhead);
               group.barrier();  // nothing has been received
               for (int number = 0; in != nullptr && number < kHeld + kAhead; ++number) {
                 EXPECT_TRUE(same_bits(in->receive(), content(0, 4, number, 1 << 20)));
               }
             });
}

/// Its last wait ends in a time-out, when nothing is received before.
void fill(Communicator& group, Sender* out, const ChannelSpec& spec) {
  for (int number = 0; out != nullptr && number < spec.held + spec.ahead; ++number) {
    send(*out, content(0, spec.tag, number, spec.bytes));
  }
  if (out != nullptr) {
    group.set_timeout(milliseconds(150));
    EXPECT_THAT(error_of<TimeoutError>([&] { out->prepare(); }), HasSubstr("it waits for rank 1."));
    group.set_timeout(std::chrono::seconds(30));
  }
  group.barrier();
}

TEST_P(ChannelPair, AReceiverThatTakesNothingStopsTheSender) {
  const ChannelSpec spec{0, 6, 1000, 2, 1};
  on_channel(GetParam(), spec, [&](Communicator& group, Sender* out, Receiver* in) {
    if (in != nullptr) in->expect(3);
    fill(group, out, spec);
    for (int number = 0; in != nullptr && number < 3; ++number) {
      EXPECT_TRUE(same_bits(in->receive(), content(0, 6, number, 1000)));
    }
  });
}

TEST_P(ChannelPair, AnEarlierChannelOfTheTagLeavesNothing) {
  const auto& [size, path] = GetParam();
  on_every_rank(size, [path = path](const CommunicatorPtr& group) {
    if (group->rank() > 1) {
      group->barrier();
      return;
    }
    ChannelSpec spec{1 - group->rank(), 7, 100, 0, 2};
    const bool sends = group->rank() == 0;
    for (const int messages : {5, 1, 0}) {
      const Channels channels =
          open(path, group, sends ? std::vector{spec} : std::vector<ChannelSpec>{},
               sends ? std::vector<ChannelSpec>{} : std::vector{spec});
      Sender* const out = sends ? channels.senders[0].get() : nullptr;
      Receiver* const in = sends ? nullptr : channels.receivers[0].get();
      if (in != nullptr) in->expect(messages > 0 ? messages : 2);
      for (int number = 0; number < messages; ++number) {
        if (out != nullptr) send(*out, content(0, 7, number, 100));
        if (in != nullptr) {
          EXPECT_TRUE(same_bits(in->receive(), content(0, 7, number, 100)));
        }
      }
      if (messages > 0) {
        if (out != nullptr) out->flush();
        continue;
      }
      fill(*group, out, spec);
      for (int number = 0; in != nullptr && number < 2; ++number) in->receive();
    }
  });
}

TEST_P(ChannelPair, MessagesMayBeShorterThanTheLongest) {
  on_channel(GetParam(), {0, 9, 100'000, 2, 2}, [](Communicator&, Sender* out, Receiver* in) {
    std::vector<at::Tensor> held;  // more than it said: the last ones are copies
    std::vector<at::Tensor> expected;
    int number = 0;
    for (const int64_t bytes : {100, 70'000, 0, 1, 100'000}) {
      if (out != nullptr) out->set_size({bytes});
      if (in != nullptr) in->set_size({bytes});
      if (in != nullptr) in->expect(3);
      for (int i = 0; i < 3; ++i) {
        expected.push_back(content(0, 9, number++, bytes));
        if (out != nullptr) send(*out, expected.back());
        if (in != nullptr) held.push_back(in->receive());
      }
    }
    for (size_t i = 0; i < held.size(); ++i) EXPECT_TRUE(same_bits(held[i], expected[i])) << i;
  });
}

TEST_P(ChannelPair, AWaitForAShorterMessageSaysHowLongItIs) {
  on_channel(GetParam(), {0, 78, 4000, 0, 1}, [](Communicator& group, Sender*, Receiver* in) {
    if (in == nullptr) return;
    group.set_timeout(milliseconds(150));
    in->set_size({40});
    in->expect(1);
    EXPECT_THAT(error_of<TimeoutError>([&] { in->receive(); }),
                HasSubstr(" of 40 bytes from rank 0 with tag 78 on group 'world'"));
    group.set_timeout(std::chrono::seconds(30));
  });
}

TEST_P(ChannelPair, ReceivedTensorsOutliveTheChannel) {
  const auto [size, path] = GetParam();
  on_every_rank(size, [path = path](const CommunicatorPtr& group) {
    const ChannelSpec spec{1 - group->rank(), 6, 5000, 1, 1};
    at::Tensor received;
    if (group->rank() == 0) {
      Channels channels = open(path, group, {spec}, {});
      send(*channels.senders[0], content(0, 6, 1, 5000));
      channels.senders[0]->flush();
    } else if (group->rank() == 1) {
      Channels channels = open(path, group, {}, {spec});
      channels.receivers[0]->expect(1);
      received = channels.receivers[0]->receive();
    }
    group->barrier();
    if (group->rank() == 1) {
      EXPECT_TRUE(same_bits(received, content(0, 6, 1, 5000)));
      // On any thread.
      std::thread([last = std::move(received)]() mutable { last.reset(); }).join();
    }
    group->barrier();
  });
}

// Both directions at once with every pair, listed in another order by each rank, while messages of
// the group go between them.
TEST_P(ChannelTest, ManyChannelsAtOnce) {
  const auto [size, path] = GetParam();
  on_every_rank(size, [path = path](const CommunicatorPtr& group) {
    constexpr int kTags = 3, kMessages = 50;
    constexpr int64_t kBytes = 777;
    std::vector<ChannelSpec> outgoing, incoming;
    for (int tag = 0; tag < kTags; ++tag) {
      for (int peer = 0; peer < group->size(); ++peer) {
        outgoing.push_back({peer, 10 + tag, kBytes, 1, 2});
        incoming.push_back({peer, 10 + tag, kBytes, 1, 2});
      }
    }
    std::shuffle(outgoing.begin(), outgoing.end(), std::mt19937(group->rank()));
    std::shuffle(incoming.begin(), incoming.end(), std::mt19937(100 + group->rank()));
    Channels channels = open(path, group, outgoing, incoming);
    for (auto& receiver : channels.receivers) receiver->expect(kMessages);
    for (int number = 0; number < kMessages; ++number) {
      for (size_t i = 0; i < outgoing.size(); ++i) {
        send(*channels.senders[i], content(group->rank(), outgoing[i].tag, number, kBytes));
      }
      const at::Tensor sum = at::full({1}, number, at::kInt);
      group->all_reduce(sum);
      EXPECT_EQ(sum.item<int>(), number * group->size());
      for (size_t i = 0; i < incoming.size(); ++i) {
        EXPECT_TRUE(same_bits(channels.receivers[i]->receive(),
                              content(incoming[i].peer, incoming[i].tag, number, kBytes)));
      }
    }
    for (auto& sender : channels.senders) sender->flush();
  });
}

TEST_P(ChannelPair, AWaitThatTakesTooLongNamesWhatItWaitsFor) {
  on_channel(GetParam(), {0, 77, 40, 0, 1}, [](Communicator& group, Sender*, Receiver* in) {
    if (in != nullptr) {
      group.set_timeout(milliseconds(150));
      in->expect(1);
      const auto start = std::chrono::steady_clock::now();
      EXPECT_THAT(
          error_of<TimeoutError>([&] { in->receive(); }),
          AllOf(HasSubstr(" of 40 bytes from rank 0 with tag 77 on group 'world' (here rank 1)"),
                HasSubstr("was not complete within the timeout of 0.15 s; it waits for rank 0."),
                HasSubstr("Check that the peer posts the matching call")));
      EXPECT_GE(std::chrono::steady_clock::now() - start, milliseconds(150));
      group.set_timeout(std::chrono::seconds(30));
    }
  });
}

/// Over messages nothing is agreed.
class AgreedChannel : public ChannelPair {};
INSTANTIATE_TEST_SUITE_P(Ranks, AgreedChannel,
                         ::testing::Combine(::testing::ValuesIn(sizes_from_two()),
                                            ::testing::Values(Path::kBest)),
                         name_of);
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(AgreedChannel);  // a world of one rank has none

TEST_P(AgreedChannel, EndsThatDisagreeAreAnErrorOnBoth) {
  on_every_rank(std::get<int>(GetParam()), [](const CommunicatorPtr& group) {
    const auto text = [&](std::vector<ChannelSpec> outgoing, std::vector<ChannelSpec> incoming) {
      return error_of<CommError>([&] { group->open_channels(outgoing, incoming); });
    };
    if (group->rank() == 0) {
      EXPECT_THAT(text({{1, 8, 100, 1, 2}}, {}),
                  HasSubstr("open_channels on group 'world': the channel with tag 8 between ranks "
                            "0 and 1 is one of 100 bytes, 1 held and 2 ahead for the first, and "
                            "one of 200 bytes, 1 held and 2 ahead for the second. Both must give "
                            "the same numbers."));
    } else if (group->rank() == 1) {
      EXPECT_THAT(text({}, {{0, 8, 200, 1, 2}}),
                  HasSubstr("is one of 200 bytes, 1 held and 2 ahead for the first, and one of 100 "
                            "bytes, 1 held and 2 ahead for the second"));
    }
    group->barrier();
  });
}

TEST_P(ChannelTest, RefusesBadSpecs) {
  const int size = std::get<0>(GetParam());
  on_every_rank(size, [](const CommunicatorPtr& group) {
    const auto outgoing = [&](ChannelSpec spec) {
      return error_of<UsageError>([&] { group->open_channels({spec}, {}); });
    };
    EXPECT_THAT(outgoing({group->size(), 0, 8, 1, 1}),
                HasSubstr("open_channels on group 'world': expected destination in 0 to "));
    EXPECT_THAT(outgoing({0, -1, 8, 1, 1}), HasSubstr("expected a tag in 0 to 65535, got -1"));
    EXPECT_THAT(outgoing({0, 0, 8, 1, 0}),
                HasSubstr("expected messages of 0 bytes or more, 0 or more held and 1 or more "
                          "ahead, got 8 bytes, 1 held and 0 ahead"));
    EXPECT_THAT(error_of<UsageError>([&] {
                  group->open_channels({}, {{-1, 0, 8, 1, 1}});
                }),
                HasSubstr("expected source in 0 to "));
  });
}

}  // namespace
}  // namespace smp::comm
