// What an engine holds and sent, next to theory (docs/design.md, section 3).

#include <zero/optim/engine_impl.h>

#include <array>
#include <iomanip>
#include <sstream>

namespace zero {
namespace {

std::string megabytes(int64_t bytes) {
  std::ostringstream text;
  text << std::fixed << std::setprecision(3) << static_cast<double>(bytes) / (1024.0 * 1024.0);
  return text.str();
}

void row(std::ostream& table, const std::array<std::string, 4>& cells) {
  table << "  " << std::left << std::setw(18) << cells[0] << std::right;
  for (size_t i = 1; i < cells.size(); ++i) {
    table << std::setw(14) << cells[i];
  }
  table << '\n';
}

void row(std::ostream& table, const char* name, int64_t held, int64_t peak, int64_t theory) {
  row(table, {name, megabytes(held), megabytes(peak), megabytes(theory)});
}

} // namespace

Engine::Report Engine::report() const {
  Report report;
  report.held = impl_->account->held();
  report.peak = impl_->account->peak();
  report.traffic = impl_->communicator->traffic();
  report.group_traffic = impl_->communicator->group_traffic();
  if (impl_->gathers != impl_->communicator) {
    report.traffic.all_gather = impl_->gathers->traffic().all_gather;
    report.group_traffic.shard.all_gather = report.traffic.all_gather;
  }
  report.replicas = impl_->communicator->size() / impl_->communicator->shard_size();
  report.steps = impl_->gradients.steps();
  report.nonfinite_steps = impl_->nonfinite_steps;
  if (impl_->left_out.defined()) { // waits for the device
    report.nonfinite_steps += impl_->left_out.item<int64_t>();
  }
  if (impl_->nonfinite_parameter >= 0) {
    report.nonfinite_parameter = impl_->table.entry(impl_->nonfinite_parameter).parameter.name;
  }
  report.padding = impl_->table.padding_bytes();
  report.transport = impl_->communicator->transport();
  impl_->fill_theory(report);
  return report;
}

std::string Engine::report_table() const {
  const Report numbers = report();
  std::ostringstream table;
  table << "Zero stage " << impl_->options.stage << ", rank " << rank() << " of " << world_size()
        << ", " << numbers.steps << " steps, transport " << numbers.transport << "\n";
  if (numbers.nonfinite_steps > 0) {
    table << "  steps left out for a non-finite gradient: " << numbers.nonfinite_steps
          << ", the last for that of parameter '" << numbers.nonfinite_parameter << "'\n";
  }
  row(table, {"MiB on this rank", "held", "peak", "theory"});
  const memory::Usage& held = numbers.held;
  const memory::Usage& peak = numbers.peak;
  const memory::Usage& theory = numbers.theory_held;
  row(table, "parameters", held.parameters, peak.parameters, theory.parameters);
  row(table, "gradients", held.gradients, peak.gradients, theory.gradients);
  row(table, "optimizer state", held.optimizer_state, peak.optimizer_state, theory.optimizer_state);
  row(table, "buffers", held.buffers, peak.buffers, theory.buffers);
  table << "  padding in parameters: " << numbers.padding << " bytes\n";
  row(table, {"MiB sent", "total", "a step", "theory"});
  const auto sent = [&](const char* name, const comm::Traffic::Count& count, int64_t expected) {
    const int64_t steps = numbers.steps > 0 ? numbers.steps : 1;
    row(table,
        {name,
         megabytes(count.bytes),
         megabytes(count.bytes / steps),
         expected < 0 ? "" : megabytes(expected)});
  };
  const comm::Traffic& traffic = numbers.traffic;
  sent("reduce-scatter", traffic.reduce_scatter, -1);
  sent("all-gather", traffic.all_gather, -1);
  sent("all-reduce", traffic.all_reduce, -1);
  sent("broadcast", traffic.broadcast, -1);
  sent("together", {0, traffic.bytes()}, numbers.theory_traffic);
  if (numbers.replicas > 1) {
    sent(
        "between replicas",
        {0, numbers.group_traffic.replicate.bytes()},
        numbers.theory_replicate_traffic);
  }
  return table.str();
}

} // namespace zero
