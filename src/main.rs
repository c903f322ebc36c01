//! The binary. Everything is in the library.

use std::process::ExitCode;

fn main() -> ExitCode {
    sessiond::run_command_line()
}
