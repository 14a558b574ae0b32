//! The daemon, its workers and the sockets that would start them again, stopped so that nothing which the daemon began can
//! stand in the way; what ran is started again on every way out, unless it is to stay down.

use std::time::Duration;

use super::units::{DEPLOY_WORKERS, SERVICE};
use crate::systemd::{Systemd, Unit};

/// For stopping: more than the units give their processes to end.
const STOP: Duration = Duration::from_secs(75);

/// What was stopped; what ran is started again when this value is gone.
pub(super) struct Stopped {
    systemd: Systemd,
    /// What ran.
    were_active: Vec<&'static str>,
    /// Why not all of it could be stopped.
    failed: Option<String>,
}

impl Stopped {
    /// Stops these units and the workers of Deploys, in one call.
    pub(super) fn stop(systemd: Systemd, names: &[&'static str]) -> Self {
        let systemd = systemd.within(STOP);
        let shown = systemd.show(names).unwrap_or_default();
        let known = |unit: &Unit| unit.load != "not-found" || unit.active == "active";
        let pairs = || names.iter().copied().zip(&shown);
        let loaded = pairs().filter(|(_, unit)| known(unit)).map(|(name, _)| name);
        let loaded: Vec<&str> = loaded.chain([DEPLOY_WORKERS]).collect();
        let were_active = pairs().filter(|(_, unit)| matches!(unit.active.as_str(), "active" | "activating"));
        let were_active = were_active.map(|(name, _)| name).collect();
        let failed = systemd.stop(&loaded).err().map(|e| format!("stopping the daemon and its workers: {e}"));
        Self { systemd, were_active, failed }
    }

    /// Why not all of it could be stopped, if so.
    pub(super) fn failed(&self) -> Option<&str> {
        self.failed.as_deref()
    }

    /// It stays down.
    pub(super) fn stays(mut self) {
        self.were_active.clear();
    }
}

impl Drop for Stopped {
    /// Starts what ran and does not now. What was started meanwhile, or seen to fail, is let be.
    fn drop(&mut self) {
        if self.were_active.is_empty() {
            return;
        }
        let shown = self.systemd.show(&self.were_active).unwrap_or_default();
        let down = self.were_active.iter().zip(&shown).filter(|(name, unit)| {
            let socket = **name != SERVICE;
            unit.active == "inactive" || (socket && unit.active == "failed")
        });
        let down: Vec<&str> = down.map(|(name, _)| *name).collect();
        if down.is_empty() {
            return;
        }
        let _ = self.systemd.reset_failed(&down);
        if let Err(e) = self.systemd.start(&down) {
            tracing::warn!("starting {} again: {e}", down.join(", "));
        }
    }
}
