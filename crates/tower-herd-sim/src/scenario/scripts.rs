//! What the settings mean to the providers.

use std::time::{Duration, SystemTime};

use super::happens::{Happens, Trouble};
use super::settings::{LimitKind, MEAN_COST, Settings};
use crate::provider::{Fault, LimitHeaders, Quota, Rate, Script};
use crate::store::StoreScript;

impl Settings {
    /// The quota that a ceiling means under these settings.
    pub fn quota(&self, ceiling: u32) -> Quota {
        let per_second = f64::from(ceiling) / self.latency.as_secs_f64();
        let rate = |per_second: f64, unit: f64| {
            let mut rate = Rate::per_second(per_second);
            rate.burst = (per_second * self.burst).max(unit);
            if self.headers == LimitHeaders::GitHub { rate.fixed(Duration::from_secs(1)) } else { rate }
        };
        match self.limit {
            LimitKind::Concurrency => Quota::concurrency(ceiling),
            LimitKind::Rate => Quota::requests(rate(per_second, 1.0)),
            LimitKind::Tokens => Quota::tokens(rate(per_second * MEAN_COST, 1.5 * MEAN_COST)),
        }
    }

    /// The script of the store where processes meet, if they do.
    pub fn store_script(&self, seed: u64) -> Option<StoreScript> {
        let p = self.noise;
        let (least, most) = (Duration::from_millis(1500), Duration::from_secs(4));
        let mut script = StoreScript::new().latency(self.store_latency).wakes(self.wakes);
        script = script.lose_requests(p).lose_replies(p).lose_wakes(p).duplicate(p).delays(p, least, most);
        for fault in self.happens.iter().filter_map(Happens::store_fault) {
            script = script.fault(fault);
        }
        self.store.then(|| script.seed(seed.wrapping_mul(0xA24B_AED4_963E_E407)))
    }

    /// The scripts of the providers, one a rung.
    pub fn scripts(&self, seed: u64) -> Vec<Script> {
        // A fixed wall clock: dates in headers then depend on the seed alone.
        let wall = SystemTime::UNIX_EPOCH + Duration::from_secs(1_800_000_000);
        let build = |(i, ceiling): (usize, &u32)| {
            let rung = i + 1;
            let mut script = Script::new(self.quota(*ceiling))
                .name(format!("rung {rung}"))
                .hint(self.hint)
                .hint_form(self.hint_form)
                .limit_headers(self.headers)
                .latency(self.latency)
                .spread(self.spread)
                .refusal_latency(self.refusal_latency)
                .lag(self.lag)
                .aborts(self.aborts)
                .enforced(self.enforced)
                .seed(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15).wrapping_add(rung as u64))
                .wall_start(wall);
            if !self.body.is_zero() {
                script = script.stream_body(self.body, 4);
            }
            if let Some(cut) = self.cut_at.filter(|_| rung == self.cut_rung) {
                script = script.change_at(self.scaled(cut), self.quota(self.cut_to));
                if let Some(back) = self.returns {
                    script = script.change_at(self.scaled(back), self.quota(*ceiling));
                }
            }
            for refused in self.happens.iter().filter(|happens| happens.what == Trouble::Refuse) {
                let Happens { process, at: from, to, .. } = *refused;
                script = script.fault(Fault::Refused { from, to, process });
            }
            if !self.closed.is_zero() {
                script = script.fault(Fault::Closed { from: Duration::ZERO, to: self.closed });
            }
            if self.fault_rung == 0 || self.fault_rung == rung {
                if let Some((from, to)) = self.outage_at() {
                    script = script.fault(match self.outage_connect {
                        true => Fault::Connect { from, to },
                        false => Fault::Unavailable { from, to },
                    });
                }
                let (from, to) = (Duration::ZERO, Duration::MAX);
                if self.failure > 0.0 {
                    script = script.fault(Fault::Brownout { from, to, probability: self.failure });
                }
                if self.stray > 0.0 {
                    script = script.fault(Fault::Stray { from, to, probability: self.stray });
                }
            }
            script
        };
        self.ceilings.iter().enumerate().map(build).collect()
    }
}
