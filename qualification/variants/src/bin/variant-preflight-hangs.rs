//! A release that never says its version.

use std::process::ExitCode;

use ployz_qualification_variants::{Spoiled, run};

fn main() -> ExitCode {
    run(Spoiled::PreflightHangs, option_env!("PLOYZ_VERSION").unwrap_or("0.0.0"))
}
