//! A release that brings a unit that systemd does not understand.

use std::process::ExitCode;

use ployz_qualification_variants::{Spoiled, run};

fn main() -> ExitCode {
    run(Spoiled::BadUnit, option_env!("PLOYZ_VERSION").unwrap_or("0.0.0"))
}
