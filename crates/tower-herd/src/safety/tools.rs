//! What a tool's server declares about the tool, and how far that is believed.

use super::Safety;

/// What the server of a tool says about it: the annotations of the Model Context Protocol
/// (`readOnlyHint`, `idempotentHint`, `destructiveHint`), or the like from elsewhere.
///
/// They are hints: the protocol itself says that a client must not decide by them unless it trusts the
/// server. [`safety`](ToolHints::safety) therefore asks for a [`Trust`].
///
/// | declared, by a trusted server | is |
/// |---|---|
/// | nothing, or only `destructive: false` (it adds: twice is one too many) | [`Safety::Once`] |
/// | `idempotent`: the same arguments again change nothing more | [`Safety::Keyed`] |
/// | `read_only` | [`Safety::Safe`] |
/// | `read_only` and `destructive`, which contradict each other | as if `read_only` were not there |
///
/// With the feature `serde` they are read by MCP's names; other members (`title`, `openWorldHint`) are
/// passed over.
///
/// ```
/// use tower_herd::{Safety, ToolHints, Trust};
///
/// let hints = ToolHints::new().idempotent(true);
/// assert_eq!(hints.safety(Trust::Vouched), Safety::Keyed);
/// assert_eq!(hints.safety(Trust::Untrusted), Safety::Once);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(default))]
#[non_exhaustive]
pub struct ToolHints {
    /// It changes nothing.
    #[cfg_attr(
        feature = "serde",
        serde(rename = "readOnlyHint", alias = "read_only", skip_serializing_if = "Option::is_none")
    )]
    pub read_only: Option<bool>,
    /// The same arguments again change nothing more.
    #[cfg_attr(
        feature = "serde",
        serde(rename = "idempotentHint", alias = "idempotent", skip_serializing_if = "Option::is_none")
    )]
    pub idempotent: Option<bool>,
    /// It may delete or overwrite, and not only add.
    #[cfg_attr(
        feature = "serde",
        serde(rename = "destructiveHint", alias = "destructive", skip_serializing_if = "Option::is_none")
    )]
    pub destructive: Option<bool>,
}

/// Whether what a server says about its tools is believed. There is no default: somebody has to decide.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "kebab-case"))]
pub enum Trust {
    /// The operator answers for the server: its own, or one it has read.
    Vouched,
    /// Anybody's. A server that calls its payment tool read-only gets no retries out of it.
    Untrusted,
}

impl ToolHints {
    /// Nothing declared.
    #[must_use]
    pub const fn new() -> Self {
        ToolHints { read_only: None, idempotent: None, destructive: None }
    }

    /// Declares whether it changes nothing.
    #[must_use]
    pub const fn read_only(mut self, yes: bool) -> Self {
        self.read_only = Some(yes);
        self
    }

    /// Declares whether the same arguments again change nothing more.
    #[must_use]
    pub const fn idempotent(mut self, yes: bool) -> Self {
        self.idempotent = Some(yes);
        self
    }

    /// Declares whether it may delete or overwrite.
    #[must_use]
    pub const fn destructive(mut self, yes: bool) -> Self {
        self.destructive = Some(yes);
        self
    }

    /// What a call of the tool may suffer; see the table above. A call that carries an idempotency key is
    /// [`with_key`](Safety::with_key) on top, whoever the server is: that it knows keys is for the caller
    /// to know.
    #[must_use]
    pub const fn safety(self, trust: Trust) -> Safety {
        match trust {
            Trust::Untrusted => Safety::Once,
            Trust::Vouched => match self {
                ToolHints { read_only: Some(true), destructive: None | Some(false), .. } => Safety::Safe,
                ToolHints { idempotent: Some(true), .. } => Safety::Keyed,
                _ => Safety::Once,
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_combination_of_hints() {
        let values = [None, Some(false), Some(true)];
        for read_only in values {
            for idempotent in values {
                for destructive in values {
                    let hints = ToolHints { read_only, idempotent, destructive };
                    assert_eq!(hints.safety(Trust::Untrusted), Safety::Once, "{hints:?}");
                    let expected = if read_only == Some(true) && destructive != Some(true) {
                        Safety::Safe
                    } else if idempotent == Some(true) {
                        Safety::Keyed
                    } else {
                        Safety::Once
                    };
                    assert_eq!(hints.safety(Trust::Vouched), expected, "{hints:?}");
                }
            }
        }
        let built = ToolHints::new().read_only(true).idempotent(false).destructive(true);
        let plain = ToolHints { read_only: Some(true), idempotent: Some(false), destructive: Some(true) };
        assert_eq!(built, plain);
    }

    #[cfg(feature = "serde")]
    #[test]
    fn reads_the_annotations_of_mcp() {
        let mcp = r#"{"title":"Search","readOnlyHint":true,"destructiveHint":null,"openWorldHint":true}"#;
        let hints: ToolHints = serde_json::from_str(mcp).unwrap();
        assert_eq!(hints, ToolHints::new().read_only(true));
        assert_eq!(serde_json::to_string(&hints).unwrap(), r#"{"readOnlyHint":true}"#);
        let ours: ToolHints = serde_json::from_str(r#"{"idempotent":true,"destructive":false}"#).unwrap();
        assert_eq!(ours, ToolHints::new().idempotent(true).destructive(false));
        assert_eq!(serde_json::from_str::<ToolHints>("{}").unwrap().safety(Trust::Vouched), Safety::Once);
    }
}
