//! Statistics of sessions: one row per group, and the total.

use serde::Serialize;

use crate::error::Result;
use crate::index::{Catalog, GroupBy, StatsFilter, StatsRow};

/// Totals per group, and of all groups.
#[derive(Debug, Serialize, schemars::JsonSchema)]
pub struct Stats {
    /// The groups; empty without a grouping.
    pub rows: Vec<StatsRow>,
    /// The total. Not the sum of the rows: a session can be in several of them.
    pub total: StatsRow,
}

/// Computes the statistics of the selected sessions.
pub async fn stats(
    index: &dyn Catalog,
    filter: StatsFilter,
    group_by: Option<GroupBy>,
) -> Result<Stats> {
    let all = StatsFilter {
        group_by: None,
        ..filter
    };
    let total = index.stats(&all).await?.pop();
    let rows = match group_by {
        Some(_) => index.stats(&StatsFilter { group_by, ..all }).await?,
        None => Vec::new(),
    };
    Ok(Stats {
        rows,
        total: total.unwrap_or_else(|| StatsRow {
            cost: Some(0),
            ..StatsRow::default()
        }),
    })
}
