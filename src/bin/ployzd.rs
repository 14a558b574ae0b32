//! `ployzd`: the Machine daemon and its installer. A shim: the version enters here and nowhere else,
//! so that building another version compiles this file and links.

use std::process::ExitCode;

/// The release that this binary is: set by the release builder, `0.0.0` in a plain `cargo build`.
const VERSION: &str = match option_env!("PLOYZ_VERSION") {
    Some(version) => version,
    None => env!("CARGO_PKG_VERSION"),
};

fn main() -> ExitCode {
    ployz::ployzd(VERSION)
}
