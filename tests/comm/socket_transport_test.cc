// SPDX-License-Identifier: Apache-2.0
// The reaction of a rank to bytes on a connection that no rank has sent. The peer is the test
// itself.

#include "comm/store/socket_transport.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

namespace smp::comm {
namespace {

using testing::StartsWith;

TimePoint soon() { return std::chrono::steady_clock::now() + std::chrono::seconds(60); }

// The header that SocketTransport sends before each message.
struct Header {
  int32_t kind;
  int32_t context;
  int32_t tag;
  int32_t source;
  uint64_t bytes;
};

// Rank 0 of two, and the connection by which it believes to reach rank 1.
class SocketTransportTest : public testing::Test {
 protected:
  SocketTransportTest() {
    const Socket listener = listen_on_free_port("127.0.0.1");
    Meeting meeting;
    meeting.ranks.resize(2);
    meeting.connections.resize(2);
    meeting.connections[1] = connect_to("127.0.0.1", port_of(listener), soon());
    await_readable({listener.fd()}, soon());
    peer_ = std::move(*accept_from(listener));
    transport_ = std::make_unique<SocketTransport>(0, std::move(meeting));
  }

  std::string abort_after(const Header& header) {
    EXPECT_TRUE(write_all(peer_, &header, sizeof header, soon()));
    EXPECT_TRUE(transport_->wait_until(soon(), [&] { return transport_->aborted(); }));
    return transport_->abort_text();
  }

  Socket peer_;
  std::unique_ptr<SocketTransport> transport_;
};

TEST_F(SocketTransportTest, WhatIsNoMessageEndsTheJobByName) {
  EXPECT_THAT(abort_after({7, 0, 0, 1, 5}),
              StartsWith("rank 0 failed: it cannot go on reading from rank 1: what begins "
                         "there (kind 7, 5 bytes) is no message. Check that all ranks run the same "
                         "version of the library"));
}

TEST_F(SocketTransportTest, ATextWithoutEndIsNone) {
  EXPECT_THAT(abort_after({1, 0, 0, 1, uint64_t{1} << 40}),
              StartsWith("rank 0 failed: it cannot go on reading from rank 1: what begins "
                         "there (kind 1, 1099511627776 bytes) is no message."));
}

// More than any memory; else the thread that reads would end the process without a word.
TEST_F(SocketTransportTest, AMessageThatNoMemoryHoldsEndsTheJobByName) {
  EXPECT_EQ(abort_after({0, 0, 3, 1, uint64_t{1} << 63}),
            "rank 0 failed: it cannot go on reading from rank 1: there is no memory for a message "
            "of 9223372036854775808 bytes");
}

}  // namespace
}  // namespace smp::comm
