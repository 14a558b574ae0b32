//! A release that never says READY.

use std::process::ExitCode;

use ployz_qualification_variants::{Spoiled, run};

fn main() -> ExitCode {
    run(Spoiled::NeverReady, option_env!("PLOYZ_VERSION").unwrap_or("0.0.0"))
}
