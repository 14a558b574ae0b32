//! A release that says far too much.

use std::process::ExitCode;

use ployz_qualification_variants::{Spoiled, run};

fn main() -> ExitCode {
    run(Spoiled::PreflightFloods, option_env!("PLOYZ_VERSION").unwrap_or("0.0.0"))
}
