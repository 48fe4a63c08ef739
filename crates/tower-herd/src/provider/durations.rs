//! What calls take: a mean and a high percentile, in fixed memory.

use std::time::Duration;

const BUCKETS: usize = 96;
const FIRST: f64 = 1e-4;
/// Four buckets an octave: a percentile is told within 19 %.
const PER_OCTAVE: f64 = 4.0;
/// When this many are counted all are halved, so that the figures follow what calls take lately.
const FADE: u32 = 1024;

/// Durations of the calls of one provider, as far as they were measured.
#[derive(Debug)]
pub(crate) struct Durations {
    counts: [u16; BUCKETS],
    total: u32,
}

impl Default for Durations {
    fn default() -> Self {
        Durations { counts: [0; BUCKETS], total: 0 }
    }
}

impl Durations {
    pub(crate) fn add(&mut self, duration: Duration) {
        let octaves = (duration.as_secs_f64() / FIRST).max(1.0).log2();
        let bucket = ((octaves * PER_OCTAVE) as usize).min(BUCKETS - 1);
        self.counts[bucket] += 1;
        self.total += 1;
        if self.total >= FADE {
            self.total = 0;
            for count in &mut self.counts {
                *count /= 2;
                self.total += u32::from(*count);
            }
        }
    }

    pub(crate) fn total(&self) -> u32 {
        self.total
    }

    /// The upper bound of the bucket in which this share of the calls has ended; none before the
    /// first was measured.
    pub(crate) fn percentile(&self, share: f64) -> Option<Duration> {
        let wanted = (f64::from(self.total) * share).ceil().max(1.0) as u32;
        let mut seen = 0;
        for (i, count) in self.counts.iter().enumerate() {
            seen += u32::from(*count);
            if seen >= wanted {
                let bound = FIRST * ((i + 1) as f64 / PER_OCTAVE).exp2();
                return Some(Duration::try_from_secs_f64(bound).unwrap_or(Duration::MAX));
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_within_a_bucket() {
        let mut durations = Durations::default();
        assert_eq!(durations.percentile(0.95), None);
        for ms in 1..=1000 {
            durations.add(Duration::from_millis(ms));
        }
        for (share, exact) in [(0.5, 0.5), (0.95, 0.95), (1.0, 1.0)] {
            let told = durations.percentile(share).unwrap().as_secs_f64();
            assert!((exact * 0.99..exact * 1.2).contains(&told), "{share}: {told}");
        }
    }

    #[test]
    fn extremes_and_forgetting() {
        let mut durations = Durations::default();
        durations.add(Duration::ZERO);
        durations.add(Duration::MAX);
        assert!(durations.percentile(1.0).unwrap() > Duration::from_secs(600));
        for _ in 0..10_000 {
            durations.add(Duration::from_secs(1));
        }
        assert!(durations.percentile(1.0).unwrap() < Duration::from_secs(2), "what calls take lately");
    }
}
