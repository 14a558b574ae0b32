//! A release that is ready, and aborts five seconds later.

use std::process::ExitCode;

use ployz_qualification_variants::{Spoiled, run};

fn main() -> ExitCode {
    run(Spoiled::CrashesLater, option_env!("PLOYZ_VERSION").unwrap_or("0.0.0"))
}
