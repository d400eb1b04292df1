// The device as torch sees it.
#pragma once

namespace simulated {

void register_device();

}  // namespace simulated
