// What the detectors found, each with the Python stack of the call that found it.
#pragma once
#include <string>
#include <vector>

namespace simulated {

void report(const std::string& text);
std::vector<std::string> take_reports();

// Stands at each entry into this library. Reports get their stack when the outermost one ends: only then does the
// thread hold no lock of ours.
class ReportScope {
 public:
  ReportScope();
  ~ReportScope();
};

}  // namespace simulated
