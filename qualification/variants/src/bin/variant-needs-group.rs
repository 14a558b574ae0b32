//! A release that brings a unit that names a group which does not exist.

use std::process::ExitCode;

use ployz_qualification_variants::{Spoiled, run};

fn main() -> ExitCode {
    run(Spoiled::NeedsGroup, option_env!("PLOYZ_VERSION").unwrap_or("0.0.0"))
}
