// SPDX-License-Identifier: Apache-2.0
#include "comm/nccl/group_store.h"

#include <algorithm>
#include <string>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <vector>

#include "comm/store/socket.h"
#include "comm/store/store_communicator.h"
#include "core/env.h"
#include "core/host.h"

namespace smp::comm {

c10::intrusive_ptr<c10d::Store> make_group_store(Communicator& host) {
  const std::vector<std::string> hosts = all_gather_bytes(host, core::host_identity());
  const bool is_one_host = std::all_of(
      hosts.begin(), hosts.end(), [&](const std::string& other) { return other == hosts.front(); });
  c10::intrusive_ptr<c10d::Store> store;
  std::string address = "127.0.0.1";
  int port = 0;
  if (host.rank() == 0) {
    store = serve_store(host.timeout(), port);
    if (!is_one_host) {
      address = address_of_this_host(core::env("SMP_SOCKET_IFNAME").value_or(""),
                                     core::env("MASTER_ADDR").value_or(""));
    }
  }
  address = broadcast_bytes(host, address, /*root=*/0);
  port = std::stoi(broadcast_bytes(host, std::to_string(port), /*root=*/0));
  return store ? store : connect_to_store(address, port, host.timeout());
}

}  // namespace smp::comm
