//! A release that exits with 42 at once.

use std::process::ExitCode;

use ployz_qualification_variants::{Spoiled, run};

fn main() -> ExitCode {
    run(Spoiled::Exits42, option_env!("PLOYZ_VERSION").unwrap_or("0.0.0"))
}
