//! A release that brings a volume plugin that does not come back.

use std::process::ExitCode;

use ployz_qualification_variants::{Spoiled, run};

fn main() -> ExitCode {
    run(Spoiled::LostPlugin, option_env!("PLOYZ_VERSION").unwrap_or("0.0.0"))
}
