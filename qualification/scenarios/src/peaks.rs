//! The most memory that each process of an installation ever had, as the kernel counts it.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::lab::lab;
use crate::machine::Machine;
use crate::run::USUAL;

/// Looks at all processes of a machine, all the time.
#[derive(Debug)]
pub struct Peaks {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<Vec<Peak>>>,
}

/// A program that a process ran.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Peak {
    /// The path of its executable.
    pub executable: String,
    /// Its first two arguments.
    pub words: String,
    /// The most that it ever had resident (`VmHWM`), in KiB.
    pub kib: u64,
}

impl Machine {
    /// Starts to look. A peak only grows, so that what was seen last is the most up to then; a process that lives for
    /// less than the time between two looks may be missed.
    #[track_caller]
    pub fn peaks(&self) -> Peaks {
        let leader = lab().machine(USUAL, &["leader", self.name()]).expect(0);
        let processes = PathBuf::from(format!("/proc/{}/root/proc", leader.text()));
        let stop = Arc::new(AtomicBool::new(false));
        let told = Arc::clone(&stop);
        let thread = std::thread::spawn(move || {
            let mut seen = BTreeMap::new();
            while !told.load(Ordering::Relaxed) {
                look(&processes, &mut seen);
                std::thread::sleep(Duration::from_millis(1));
            }
            seen.into_values().collect()
        });
        Peaks { stop, thread: Some(thread) }
    }
}

impl Peaks {
    /// Stops, and says what was seen, each process that ran a program of its own.
    pub fn stop(mut self) -> Vec<Peak> {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.take().map(JoinHandle::join).and_then(Result::ok).expect("looking ended by itself")
    }
}

impl Drop for Peaks {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}

fn look(processes: &Path, seen: &mut BTreeMap<(String, PathBuf, String), Peak>) {
    for entry in fs::read_dir(processes).into_iter().flatten().flatten() {
        let pid = entry.file_name().to_string_lossy().into_owned();
        if !pid.starts_with(|first: char| first.is_ascii_digit()) {
            continue;
        }
        // Gone meanwhile, or a thread of the kernel.
        let (Ok(executable), Ok(status), Ok(words)) = (
            fs::read_link(entry.path().join("exe")),
            fs::read_to_string(entry.path().join("status")),
            fs::read(entry.path().join("cmdline")),
        ) else {
            continue;
        };
        let most = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
        let Some(kib) = most.and_then(|text| text.split_whitespace().next()?.parse().ok()) else { continue };
        let words: Vec<_> = words.split(|b| *b == 0).skip(1).take(2).map(String::from_utf8_lossy).collect();
        let words = words.join(" ").trim().to_owned();
        let peak = Peak { executable: executable.display().to_string(), words: words.clone(), kib };
        let known = seen.entry((pid, executable, words)).or_insert_with(|| peak.clone());
        known.kib = known.kib.max(kib);
    }
}
