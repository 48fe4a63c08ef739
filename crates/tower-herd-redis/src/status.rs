//! What the store knows, for people.

use serde::Deserialize;

/// What the store knows of a provider.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[non_exhaustive]
pub struct Status {
    /// How many hold a record.
    #[serde(default)]
    pub members: u32,
}
