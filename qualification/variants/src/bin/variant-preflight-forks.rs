//! A release that leaves processes behind when it is asked for its version.

use std::process::ExitCode;

use ployz_qualification_variants::{Spoiled, run};

fn main() -> ExitCode {
    run(Spoiled::PreflightForks, option_env!("PLOYZ_VERSION").unwrap_or("0.0.0"))
}
