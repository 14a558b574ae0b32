//! A release that brings a volume plugin that works.

use std::process::ExitCode;

use ployz_qualification_variants::{Spoiled, run};

fn main() -> ExitCode {
    run(Spoiled::WithPlugin, option_env!("PLOYZ_VERSION").unwrap_or("0.0.0"))
}
