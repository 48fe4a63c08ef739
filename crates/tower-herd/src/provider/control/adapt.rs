//! How the machine is driven by the gate, the settings and the sensor.

use super::{Admitted, BlockedUntil, Control, LimitHeaders, Rate, Settings, mean};
use crate::{Quota, Time, gate, provider::ProviderSettings};
use std::time::Duration;

impl From<&ProviderSettings> for Settings {
    fn from(known: &ProviderSettings) -> Self {
        Settings {
            start: known.start,
            floor: known.floor,
            max: known.ceiling,
            rate: known.requests_per_minute.map(|n| Rate { every: Duration::from_secs(60) / n.max(1) }),
            ..Settings::default()
        }
    }
}

impl From<Quota> for LimitHeaders {
    fn from(quota: Quota) -> Self {
        LimitHeaders {
            limit: quota.limit.into(),
            remaining: quota.remaining.into(),
            reset: quota.reset,
            resolution: quota.resolution,
        }
    }
}

impl gate::Pacer for Control {
    type Admitted = Admitted;

    fn admit(&mut self, now: Time, busy: u32, waiting: usize) -> Result<Admitted, gate::Blocked> {
        Control::admit(self, now, busy, waiting)
            .map_err(|BlockedUntil(at)| at.map_or(gate::Blocked::Slot, gate::Blocked::Until))
    }

    fn published(&self) -> gate::Published {
        // One above the ceiling is admitted only when a probe is due, and only `admit` knows.
        let above = u32::from(self.looks_above());
        gate::Published {
            cap: self.ceiling().saturating_add(above),
            fast: self.fast_cap(),
            slow: self.slow(),
        }
    }
}

impl Control {
    /// From which rank on (or from which number in flight on) a success changes anything.
    pub(in crate::provider) fn interest(&self) -> u32 {
        if !self.watches() {
            return u32::MAX;
        }
        if self.set.led || self.bare > 0 || self.pace.is_some() || self.probe.is_some() {
            return 0;
        }
        self.proven.saturating_add(1).min(self.ceiling())
    }

    /// Starts over with other settings. What calls in flight carry stays valid, and so does a pause: it was
    /// not the settings that asked for it.
    pub(in crate::provider) fn configure(&mut self, settings: Settings) {
        let Control { admitted, stamp, pause, release, bare, latency, refusal, lead, cap, limit, .. } = *self;
        let led = settings.led;
        *self = Control::new(settings);
        (self.admitted, self.stamp, self.cut) = (admitted, stamp, stamp);
        (self.pause, self.release, self.bare) = (pause, release, bare);
        (self.latency, self.refusal) = (latency, refusal);
        if led {
            // What the fleet may do is the store's to say.
            (self.lead, self.cap, self.limit) = (lead, cap, limit);
        }
    }

    /// Goes on with other settings. A new maximum or rate is taken at its word, and learned from anew; where
    /// these stay, so does what was learned.
    pub(in crate::provider) fn reconfigure(&mut self, settings: Settings) {
        let settings = Settings { floor: settings.floor.max(1), ..settings };
        if settings.max != self.set.max || settings.rate != self.set.rate {
            return self.configure(settings);
        }
        self.set = settings;
        self.cap = self.cap.max(settings.floor);
        self.limit = self.limit.map(|limit| limit.max(settings.floor));
    }

    /// A call lasted so long.
    pub(in crate::provider) fn on_duration(&mut self, took: Duration) {
        self.latency = Some(mean(self.latency, took));
    }
}
