// The GPUs this process sees, and whether this build has code for them.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace flashqla::cuda {

struct GpuInfo {
    std::string name;
    int major = 0, minor = 0;  // compute capability
    int multiprocessors = 0;
    int shared_bytes = 0;     // the most a block may ask for
    bool hopper = false;      // it has Hopper's own instructions, and this build code with them
    bool grids_wait = false;  // the code it runs waits for earlier kernels where it says so (device/grid_order.cuh)
};

struct Gpus {
    std::vector<GpuInfo> list;
    std::string problem;  // why the list is empty
};

// Asked once in the life of the process.
const Gpus& gpus();

// The architectures of this build as CMake spells them: "80 86-real 90a-real".
std::string_view architectures() noexcept;

// Whether code for `architectures` runs on compute capability major.minor. Machine code runs on its own major version
// from its own minor on; with an "a" on exactly that one; PTX ("80", "80-virtual") on everything from its own on.
bool has_code_for(std::string_view architectures, int major, int minor) noexcept;

// Whether what runs there was compiled for 9.0 or later, as far as the list says.
bool has_code_from_hopper_on(std::string_view architectures, int major, int minor) noexcept;

// Whether the list has code for exactly compute capability major.minor ("90a"), which may use all that it has.
bool has_exact_code_for(std::string_view architectures, int major, int minor) noexcept;

// Makes a GPU current for this thread and puts the one before back. Neither waits for a device.
class CurrentDevice {
public:
    explicit CurrentDevice(int index) noexcept;
    ~CurrentDevice();
    CurrentDevice(const CurrentDevice&) = delete;
    CurrentDevice& operator=(const CurrentDevice&) = delete;
    int error() const noexcept { return error_; }  // cudaError_t

private:
    int before_ = -1, error_ = 0;
};

}  // namespace flashqla::cuda
