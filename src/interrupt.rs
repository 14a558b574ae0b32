//! The wish of a person or of systemd that this process end: Ctrl-C, SIGTERM, SIGHUP, read where the flow can act
//! on them and never in the middle of a step.

use std::os::fd::{AsFd, BorrowedFd};

use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};

/// Signals that ask this process to end, held back and readable.
#[derive(Debug)]
pub struct Interrupt {
    signals: SignalFd,
    seen: std::cell::Cell<Option<&'static str>>,
    terminate: std::cell::Cell<bool>,
}

impl Interrupt {
    /// Holds the signals back from now on, in this thread and those it starts. Children are started with a clean
    /// mask by the standard library.
    ///
    /// # Errors
    /// The system's.
    pub fn hold() -> std::io::Result<Self> {
        let mut set = SigSet::empty();
        for signal in [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP] {
            set.add(signal);
        }
        set.thread_block()?;
        let signals = SignalFd::with_flags(&set, SfdFlags::SFD_NONBLOCK | SfdFlags::SFD_CLOEXEC)?;
        Ok(Self { signals, seen: std::cell::Cell::new(None), terminate: std::cell::Cell::new(false) })
    }

    /// One that never comes: for what is given up by its own deadline alone.
    ///
    /// # Errors
    /// The system's.
    pub fn never() -> std::io::Result<Self> {
        let signals = SignalFd::with_flags(&SigSet::empty(), SfdFlags::SFD_NONBLOCK | SfdFlags::SFD_CLOEXEC)?;
        Ok(Self { signals, seen: std::cell::Cell::new(None), terminate: std::cell::Cell::new(false) })
    }

    /// The name of the first signal that came, if one has.
    pub fn requested(&self) -> Option<&'static str> {
        while let Ok(Some(info)) = self.signals.read_signal() {
            let signal = i32::try_from(info.ssi_signo).ok().and_then(|n| Signal::try_from(n).ok());
            let name = signal.map_or("a signal", Signal::as_str);
            self.terminate.set(self.terminate.get() || signal == Some(Signal::SIGTERM));
            self.seen.set(self.seen.get().or(Some(name)));
        }
        self.seen.get()
    }

    /// Whether SIGTERM came: systemd stops this unit or the system, and will not wait long.
    pub fn terminated(&self) -> bool {
        self.requested();
        self.terminate.get()
    }

    /// Becomes readable when a signal comes.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.signals.as_fd()
    }
}
