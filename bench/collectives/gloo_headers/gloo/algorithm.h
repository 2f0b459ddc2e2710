// SPDX-License-Identifier: Apache-2.0
// libtorch ships gloo's code but not its headers. These are what the declaration of
// c10d::ProcessGroupGloo needs, and nothing that could be used.
#pragma once
