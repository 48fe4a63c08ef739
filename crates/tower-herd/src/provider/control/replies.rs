//! What replies teach.

use super::{Admitted, CONTRADICTIONS, Control, Event, GROW, LimitHeaders, PAUSE_MAX, Source, mean};
use crate::Time;
use std::time::Duration;

impl Control {
    /// A call was served. `busy` includes it.
    pub fn on_success(
        &mut self,
        now: Time,
        call: Admitted,
        busy: u32,
        waiting: usize,
        latency: Option<Duration>,
        limits: Option<LimitHeaders>,
    ) {
        self.bare = 0;
        self.note_idle(now, busy);
        if let Some(l) = latency {
            self.latency = Some(mean(self.latency, l));
        }
        if self.set.led {
            return self.led_success();
        }
        self.trial_served(now, call);
        if let Some(h) = limits {
            self.on_headers(now, call, busy, h);
        }
        if call.stamp < self.cut {
            return;
        }
        self.proven = self.proven.max(call.rank);
        if self.probe.is_some_and(|p| call.rank >= p.rank) {
            self.probe = None;
        }
        match self.limit {
            Some(l) if call.rank > l => self.accepted_above(now, call.rank),
            Some(l) if self.cap >= l => {}
            limit => {
                // grow only if the cap is what holds calls back
                if busy >= self.cap && (waiting > 0 || limit.is_none()) {
                    let by = if limit.is_none() { GROW } else { 1 };
                    self.cap = self.cap.saturating_add(by).min(limit.unwrap_or(u32::MAX)).min(self.top());
                }
            }
        }
    }

    /// A call was refused for flow control (a 429). `busy` includes it.
    pub fn on_throttled(&mut self, now: Time, call: Admitted, busy: u32, hint: Option<Duration>) {
        self.throttled(now, call, busy, hint, true);
    }

    /// The same where only a part of the provider (a model, a route) is paused for `wait`, by
    /// somebody else: it cuts, and pauses nothing here.
    pub fn on_throttled_in_part(&mut self, now: Time, call: Admitted, busy: u32, wait: Duration) {
        self.throttled(now, call, busy, Some(wait), false);
    }

    pub(super) fn throttled(
        &mut self,
        now: Time,
        call: Admitted,
        busy: u32,
        hint: Option<Duration>,
        pauses: bool,
    ) {
        self.note_idle(now, busy);
        if self.set.led {
            return self.led_throttled(now, call, hint, pauses);
        }
        let came_back = u32::try_from(self.stamp.saturating_sub(call.stamp)).unwrap_or(u32::MAX);
        let served = call.rank.saturating_sub(1).saturating_sub(came_back);
        self.stamp = self.stamp.saturating_add(1);
        if call.at > Time::ZERO {
            self.refusal = Some(mean(self.refusal, now.saturating_since(call.at)));
        }
        let same = call.stamp < self.cut;
        let cost = hint.unwrap_or_else(|| {
            let doubled = self.set.bare.saturating_mul(1 << self.bare.min(16)).min(self.set.bare_max);
            if same {
                self.set.bare
            } else {
                self.bare = self.bare.saturating_add(1);
                doubled
            }
        });
        let doubt = if same { self.release.is_none_or(|r| r.doubt) } else { true };
        let cost = if pauses {
            self.set_pause(now, cost, doubt);
            self.pause.saturating_since(now)
        } else {
            cost.min(PAUSE_MAX)
        };
        if same {
            if self.limit.is_some_and(|l| served >= 1 && served < l && self.pace.is_none()) {
                let s = served.max(self.set.floor);
                self.limit = Some(s);
                self.cap = self.cap.min(s);
            }
            self.probe_at = self.probe_at.max(self.pause.saturating_add(self.gap(cost)));
            return;
        }
        self.cut = self.stamp;
        let sent = if call.at > Time::ZERO { call.at } else { now };
        let since = self.event.replace(Event { sent, cost, admits: 0, verified: false });
        if since.is_some_and(|e| sent.saturating_since(e.sent) > self.gap(e.cost)) {
            self.contradictions = 0;
        }
        self.probe = None;
        match self.pace.map(|p| p.source) {
            Some(Source::Configured | Source::Told) if !self.told_rate_refused(now, call) => return,
            Some(Source::Learned) => {
                self.rate_refused(now, sent, since);
                self.probe_at = self.pause.saturating_add(self.gap(cost));
                return;
            }
            _ => {}
        }
        if served > 0 {
            let near = self.cut_to(served, call, since);
            // Where a pause costs several calls, a refusal where calls were accepted a moment ago is
            // enough to heed the rate too.
            let suspect = self.is_dear(cost) && (near || self.contradictions > 2);
            let paced = self.pace.is_some_and(|p| p.source == Source::Suspected);
            if self.contradictions >= CONTRADICTIONS || suspect || paced {
                self.rate_refused(now, sent, since);
            }
        }
        self.high = 0;
        self.probe_at = self.pause.saturating_add(self.gap(cost));
    }

    /// The provider is overloaded (529, 503 with a hint): one cut by a quarter, and its pause.
    pub fn on_overloaded(&mut self, now: Time, call: Admitted, busy: u32, hint: Option<Duration>) {
        self.note_idle(now, busy);
        if let Some(h) = hint {
            self.set_pause(now, h, true);
        }
        if self.set.led || call.stamp < self.cut {
            return;
        }
        self.stamp = self.stamp.saturating_add(1);
        self.cut = self.stamp;
        let before = self.cap.min(busy).max(self.set.floor);
        self.limit = Some(self.limit.unwrap_or(before));
        self.cap = (before - before / 4).max(self.set.floor);
        self.step = 1;
        self.probe = None;
        let cost = self.pause.saturating_since(now).max(self.set.bare);
        self.probe_at = self.pause.max(now).saturating_add(self.gap(cost));
    }

    /// A call failed, or was dropped, in a way that says nothing about limits.
    pub fn on_failed(&mut self, now: Time, call: Admitted, busy: u32) {
        self.note_idle(now, busy);
        self.lose_probe(call);
    }

    pub(super) fn note_idle(&mut self, now: Time, busy: u32) {
        self.turnaround.look(now, busy.saturating_sub(1));
        if busy <= 1 {
            self.idle = Some(now);
        }
    }
}
