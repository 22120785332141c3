#include <string>
#include <utility>

#include "base/backend.hpp"
#include "flashqla/flashqla.hpp"

namespace flashqla {

struct Status::Detail {
    Code code;
    std::string message;
};

Status::Status(Code code, std::string message) {
    if (code != Code::ok) detail_ = std::make_shared<const Detail>(Detail{code, std::move(message)});
}

Code Status::code() const noexcept { return detail_ ? detail_->code : Code::ok; }

const std::string& Status::message() const noexcept {
    static const std::string empty;
    return detail_ ? detail_->message : empty;
}

Status PassPlan::run(const ForwardCall&, std::byte*, Stream) const noexcept {
    return {Code::internal, "flashqla: this plan has no forward pass"};
}
Status PassPlan::run(const BackwardCall&, std::byte*, Stream) const noexcept {
    return {Code::internal, "flashqla: this plan has no backward pass"};
}
Status PassPlan::run(const DecodeCall&, std::byte*, Stream) const noexcept {
    return {Code::internal, "flashqla: this plan has no decode pass"};
}
Status PassPlan::run(const CommitCall&, std::byte*, Stream) const noexcept {
    return {Code::unsupported, "flashqla::commit: the backend of this plan commits no states"};
}

}  // namespace flashqla
