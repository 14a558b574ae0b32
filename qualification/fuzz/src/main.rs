//! The program that libFuzzer drives: one reader, named by `PLOYZ_READER`, given one input after another.
//!
//! What is read, and what must hold of it, is in `ployz::install::readers`. Built any other way than by
//! `qualification/fuzz/run`, this program does nothing.

#![cfg_attr(fuzzing, no_main)]

#[cfg(fuzzing)]
mod driven {
    use std::path::Path;
    use std::sync::OnceLock;

    use ployz::install::readers::{READERS, Reader};

    /// The reader of this process, and a directory for it.
    static CHOSEN: OnceLock<(&'static Reader, tempfile::TempDir)> = OnceLock::new();

    /// Chooses the reader that the environment names.
    pub(crate) fn choose() {
        let _ = CHOSEN.get_or_init(|| {
            let name = std::env::var("PLOYZ_READER").unwrap_or_default();
            let reader = READERS.iter().find(|reader| reader.name == name);
            let directory = tempfile::tempdir();
            match (reader, directory) {
                (Some(reader), Ok(directory)) => (reader, directory),
                (None, _) => stop(&format!("PLOYZ_READER is {name:?}, which is no reader")),
                (_, Err(e)) => stop(&format!("making a directory: {e}")),
            }
        });
    }

    /// Gives it one input.
    pub(crate) fn read(bytes: &[u8]) {
        if let Some((reader, directory)) = CHOSEN.get() {
            let path: &Path = directory.path();
            (reader.check)(bytes, path);
        }
    }

    #[expect(clippy::print_stderr, clippy::exit, reason = "a wrong call ends before libFuzzer begins")]
    fn stop(why: &str) -> ! {
        eprintln!("fuzz: {why}");
        std::process::exit(2)
    }
}

#[cfg(fuzzing)]
libfuzzer_sys::fuzz_target!(
    init: driven::choose(),
    |bytes: &[u8]| {
        driven::read(bytes);
    }
);

#[cfg(not(fuzzing))]
fn main() -> std::process::ExitCode {
    std::process::ExitCode::from(2)
}
