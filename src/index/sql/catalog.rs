//! What transcripts say, asked of the database: each answer is one call.

use async_trait::async_trait;
use sqlx::Row;

use super::list::Statement;
use super::{SqlIndex, browse, search, stats};
use crate::error::Result;
use crate::index::{
    Catalog, Found, MessageFilter, MessagePage, SearchFilter, StatsFilter, StatsRow,
};
use crate::model::LogId;

#[async_trait]
impl Catalog for SqlIndex {
    async fn messages(&self, log: &LogId, filter: &MessageFilter) -> Result<MessagePage> {
        let cursor = filter
            .cursor
            .as_deref()
            .map(browse::Cursor::parse)
            .transpose()?;
        self.call(async {
            let mut connection = self.pool().await?.acquire().await?;
            browse::page(&mut connection, log, filter, cursor).await
        })
        .await
    }

    async fn search(&self, filter: &SearchFilter) -> Result<Found> {
        self.call(async {
            let mut connection = self.pool().await?.acquire().await?;
            search::search(&mut connection, filter).await
        })
        .await
    }

    async fn stats(&self, filter: &StatsFilter) -> Result<Vec<StatsRow>> {
        self.call(async {
            let mut connection = self.pool().await?.acquire().await?;
            stats::stats(&mut connection, filter).await
        })
        .await
    }
}

impl SqlIndex {
    /// How the database would find a page of messages, in its own words: for who watches that no page needs a scan.
    pub async fn plan_of_messages(
        &self,
        log: &LogId,
        filter: &MessageFilter,
    ) -> Result<Vec<String>> {
        let cursor = filter
            .cursor
            .as_deref()
            .map(browse::Cursor::parse)
            .transpose()?;
        self.call(async {
            let mut connection = self.pool().await?.acquire().await?;
            let (explain, column) = self.target.explain();
            let mut statement = Statement::new(explain);
            browse::query(&mut statement, log, filter, cursor)?;
            let plan = statement.fetch(&mut connection).await?;
            plan.iter().map(|row| Ok(row.try_get(column)?)).collect()
        })
        .await
    }
}
