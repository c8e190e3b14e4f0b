#include <zero/optim/join_message.h>

#include <algorithm>
#include <cstring>
#include <type_traits>

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

namespace zero::optim {
namespace {

constexpr int64_t kTagId = -2;

class Writer {
 public:
  void add(const void* data, size_t size) {
    const auto* bytes = static_cast<const uint8_t*>(data);
    bytes_.insert(bytes_.end(), bytes, bytes + size);
  }
  template <typename T>
  void value(const T& value) {
    add(&value, sizeof(value));
  }
  template <typename Items>
  void items(const Items& items) {
    value(static_cast<int64_t>(items.size()));
    add(items.data(), items.size() * sizeof(*items.data()));
  }
  at::Tensor tensor() const {
    at::Tensor result = at::empty({static_cast<int64_t>(bytes_.size())}, at::kByte);
    std::memcpy(result.mutable_data_ptr(), bytes_.data(), bytes_.size());
    return result;
  }

 private:
  std::vector<uint8_t> bytes_;
};

class Reader {
 public:
  explicit Reader(const at::Tensor& bytes)
      : next_(bytes.const_data_ptr<uint8_t>()), end_(next_ + bytes.numel()) {}

  void take(void* data, size_t size) {
    TORCH_INTERNAL_ASSERT(size <= static_cast<size_t>(end_ - next_));
    if (size > 0) {
      std::memcpy(data, next_, size);
    }
    next_ += size;
  }
  template <typename T>
  void value(T& value) {
    take(&value, sizeof(value));
  }
  template <typename Items>
  void items(Items& items) {
    int64_t count = 0;
    value(count);
    items.resize(count);
    take(items.data(), items.size() * sizeof(*items.data()));
  }

 private:
  const uint8_t* next_;
  const uint8_t* end_;
};

at::Tensor write(const JoinMessage& message) {
  Writer writer;
  writer.value(message.action);
  writer.value(message.arguments);
  writer.value(message.local);
  writer.value(message.actions);
  writer.value(message.zeros);
  writer.items(message.text);
  writer.items(message.order);
  writer.items(message.presence);
  return writer.tensor();
}

JoinMessage read(const at::Tensor& bytes) {
  Reader reader(bytes);
  JoinMessage message;
  reader.value(message.action);
  reader.value(message.arguments);
  reader.value(message.local);
  reader.value(message.actions);
  reader.value(message.zeros);
  reader.items(message.text);
  reader.items(message.order);
  reader.items(message.presence);
  return message;
}

bool named_by_text(JoinAction action) {
  return action == JoinAction::other || action == JoinAction::inspect;
}

// Hyper-parameters are the first active rank's, as with a scheduler that stands still.
bool same(const JoinMessage& left, const JoinMessage& right) {
  return left.action == right.action && left.arguments == right.arguments &&
      (!named_by_text(left.action) || left.text == right.text);
}

std::string tag_of(const JoinMessage& own) {
  if (own.action == JoinAction::joined) {
    return "zero.join by a rank whose data has ended";
  }
  return describe(own) + " inside zero.join";
}

std::string described(const JoinMessage& message, const JoinMessage& other) {
  std::string text = describe(message);
  if (message.action == other.action && message.arguments != other.arguments) {
    text += c10::str(
        " with ", message.arguments[0], ", ", message.arguments[1], ", ", message.arguments[2]);
  }
  return text;
}

void check(const JoinRound& round, const JoinMessage& own, int64_t rank) {
  const auto size = round.messages.size();
  for (size_t r = 0; r < size; ++r) {
    const JoinMessage& message = round.messages[r];
    TORCH_CHECK(
        message.action != JoinAction::raised || static_cast<int64_t>(r) == rank,
        "[zero.optim] rank ",
        r,
        " left zero.join by an exception: ",
        message.text,
        " (rank ",
        rank,
        " of ",
        size,
        " was in ",
        tag_of(own),
        "); see its own error");
  }
  for (const int64_t r : round.active) {
    const JoinMessage& first = round.followed();
    const JoinMessage& message = round.messages[r];
    TORCH_CHECK(
        same(first, message),
        "[zero.optim] ranks disagree inside zero.join: rank ",
        round.source,
        " is about to do ",
        described(first, message),
        ", rank ",
        r,
        " ",
        described(message, first),
        " (seen on rank ",
        rank,
        " of ",
        size,
        "); all ranks whose loop still runs must do the same in the same order");
  }
}

} // namespace

bool JoinRound::any_local() const {
  return std::any_of(
      messages.begin(), messages.end(), [](const JoinMessage& message) { return message.local; });
}

int64_t JoinRound::contributors() const {
  return std::count_if(messages.begin(), messages.end(), [](const JoinMessage& message) {
    return message.active() || message.local;
  });
}

JoinRound meet(comm::Communicator& communicator, const JoinMessage& own) {
  JoinRound round;
  for (const at::Tensor& bytes :
       communicator.exchange(write(own), {tag_of(own), kTagId, /*step=*/0, false})) {
    const auto rank = static_cast<int64_t>(round.messages.size());
    round.messages.push_back(read(bytes));
    if (round.messages.back().active()) {
      round.active.push_back(rank);
    }
    if (round.messages.back().actions > round.followed().actions) {
      round.source = rank;
    }
  }
  if (!round.active.empty()) {
    round.source = round.active.front();
  }
  check(round, own, communicator.rank());
  return round;
}

std::string describe(const JoinMessage& message) {
  switch (message.action) {
  case JoinAction::joined:
    return "nothing of its own";
  case JoinAction::raised:
    return "the end by an exception";
  case JoinAction::backward:
    return "a backward";
  case JoinAction::step:
  case JoinAction::foreign_step:
    return "step";
  case JoinAction::clip_norm:
    return "clip_grad_norm_";
  case JoinAction::clip_value:
    return "clip_grad_value_";
  case JoinAction::norm:
  case JoinAction::norms:
    return "grad_norm";
  case JoinAction::divide:
    return "divide_grad_";
  case JoinAction::buffers:
    return "a forward that syncs buffers";
  case JoinAction::zero_grad:
    return "zero_grad(set_to_none=False)";
  case JoinAction::synchronize:
    return "synchronize";
  case JoinAction::gather:
    return c10::str("a gather of bucket ", message.arguments[0]);
  case JoinAction::inspect:
  case JoinAction::other:
    return message.text;
  }
  return "an unknown action";
}

static_assert(std::is_trivially_copyable_v<Rule>);

std::string pack(const std::vector<Rule>& rules) {
  std::string text(rules.size() * sizeof(Rule), '\0');
  if (!rules.empty()) {
    std::memcpy(text.data(), rules.data(), text.size());
  }
  return text;
}

std::vector<Rule> unpack(const std::string& text) {
  std::vector<Rule> rules(text.size() / sizeof(Rule));
  if (!rules.empty()) {
    std::memcpy(static_cast<void*>(rules.data()), text.data(), text.size());
  }
  return rules;
}

} // namespace zero::optim
