#include "reports.h"

#include <torch/csrc/utils/pybind.h>

#include "timelines.h"

namespace py = pybind11;

namespace simulated {
namespace {

constexpr size_t MOST_REPORTS = 400;
constexpr int FRAMES = 10;

std::vector<std::string> reports;
thread_local std::vector<std::string> found;
thread_local int depth = 0;

std::string python_stack() {
  if (!Py_IsInitialized()) return "";
  py::gil_scoped_acquire gil;
  try {
    py::list frames = py::module_::import("traceback").attr("extract_stack")();
    std::string text;
    const int count = int(py::len(frames));
    for (int i = count - 1; i >= 0 && i >= count - FRAMES; i--) {
      py::object frame = frames[i];
      text += "\n    " + std::string(py::str(frame.attr("filename"))) + ":" + std::string(py::str(frame.attr("lineno"))) +
          " " + std::string(py::str(frame.attr("name")));
    }
    return text;
  } catch (py::error_already_set&) {
    return "\n    (no stack)";
  }
}

}  // namespace

void report(const std::string& text) { found.push_back(text); }

std::vector<std::string> take_reports() {
  Lock lock(state());
  return std::exchange(reports, {});
}

ReportScope::ReportScope() { depth++; }

ReportScope::~ReportScope() {
  if (--depth || found.empty()) return;
  const auto texts = std::exchange(found, {});
  const auto stack = python_stack();
  Lock lock(state());
  for (const auto& text : texts)
    if (reports.size() < MOST_REPORTS) reports.push_back(text + stack);
}

}  // namespace simulated
